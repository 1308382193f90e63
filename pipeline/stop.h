/* Being told to stop: signals, and the deadline that follows.
 *
 * SIGTERM, SIGINT, SIGUSR1 and SIGUSR2 ask for an orderly stop; a second one ends the process at once with
 * status 75. What is committed is whole either way. SIGXFSZ and SIGPIPE are ignored, so that a write fails
 * with EFBIG or EPIPE and is reported. */
#ifndef ACTDUMP_PIPELINE_STOP_H
#define ACTDUMP_PIPELINE_STOP_H

#include <stdbool.h>

/* Installs the handlers. */
void stop_install(void);
/* The signal that asked for a stop, 0 where none did. */
int stop_signal(void);
/* From `seconds` from now on the process may be ended at any moment with status 75 by a watchdog thread,
 * whatever it is doing. Calls after the first do nothing. */
void stop_set_deadline(double seconds);
/* Seconds until that deadline; a huge number where none is set. */
double stop_seconds_left(void);
/* Takes the deadline back: the process is past the point where it could lose anything. */
void stop_cancel_deadline(void);

#endif
