#include "pipeline/stop.h"

#include "kernels/base/error.h"
#include "kernels/base/processors.h"
#include "pipeline/clock.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

static volatile sig_atomic_t received;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static double deadline_s; /* 0: none; under lock */
static bool has_watchdog; /* under lock */

static void on_signal(int number)
{
    if (received != 0)
        _exit(STATUS_STOPPED); /* async-signal-safe, unlike exit: no destructor may wait for a thread now */
    received = number;
}

void stop_install(void)
{
    static const int asking[] = {SIGTERM, SIGINT, SIGUSR1, SIGUSR2};
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = on_signal;
    action.sa_flags = SA_RESTART;
    for (size_t i = 0; i < sizeof asking / sizeof *asking; i++)
        sigaction(asking[i], &action, NULL);
    action.sa_handler = SIG_IGN;
    sigaction(SIGXFSZ, &action, NULL);
    sigaction(SIGPIPE, &action, NULL);
}

int stop_signal(void)
{
    return received;
}

double stop_seconds_left(void)
{
    pthread_mutex_lock(&lock);
    double left = deadline_s == 0 ? 1e18 : deadline_s - clock_seconds();
    pthread_mutex_unlock(&lock);
    return left;
}

static void *watch_deadline(void *unused)
{
    (void)unused;
    static const char message[] = "actdump: the grace period is over; the unit at hand is dropped\n";
    processors_release_thread();
    for (;;) {
        double left = stop_seconds_left();
        if (left <= 0) {
            ssize_t ignored = write(STDERR_FILENO, message, sizeof message - 1);
            (void)ignored;
            _exit(STATUS_STOPPED);
        }
        clock_sleep(left < 0.2 ? left : 0.2);
    }
    return NULL;
}

void stop_set_deadline(double seconds)
{
    pthread_mutex_lock(&lock);
    bool first = deadline_s == 0;
    if (first)
        deadline_s = clock_seconds() + seconds;
    bool start = first && !has_watchdog;
    has_watchdog |= start;
    pthread_mutex_unlock(&lock);
    pthread_t thread;
    if (start && pthread_create(&thread, NULL, watch_deadline, NULL) == 0)
        pthread_detach(thread);
}

void stop_cancel_deadline(void)
{
    pthread_mutex_lock(&lock);
    if (deadline_s != 0)
        deadline_s = clock_seconds() + 1e9;
    pthread_mutex_unlock(&lock);
}
