/* The part that all state-space mixers share: the scan over a batch, in pieces where states or decays are
 * wanted, each row of which may be megabytes, and the offers of everything that is read off the states.
 *
 * One row of states serves linear_attn/states, state, state_output (at a window's last token) and state_input
 * (at the last token before the window, or the state carried from the batch before, or zeros). */
#ifndef ACTDUMP_ENGINE_BLOCKS_SCAN_H
#define ACTDUMP_ENGINE_BLOCKS_SCAN_H

#include "engine/forward.h"

/* What a document's next batch goes on from; of one layer, on the backend, NULL without carry. */
struct scan_carry {
    float *conv_tail;  /* [conv_kernel - 1, convolved channels] */
    float *state;      /* as the scan keeps it; without carry too, for going from piece to piece */
    float *last_state; /* [1, width] the same as a value; only where state_input is wanted */
};

/* One call of the backend's scan. */
struct scan_piece {
    int64_t first, n; /* tokens of the batch */
    struct runs runs;
    float *state;
    struct row_list state_rows, decay_rows; /* counted from `first` */
    struct tensor states, decays;           /* data NULL where no row of the piece is wanted */
};

struct scan {
    const struct scan_carry *carry;
    int64_t state_width; /* elements of one token's state */
    bool has_decay_rows; /* decays are as wide as states and come in pieces too (Mamba-1) */
    const void *mixer;   /* handed to `run` */
    void (*run)(struct forward *f, const void *mixer, const struct scan_piece *piece);
};

/* Bytes that a token's row of states, and of decays, takes in the buffer for pieces; 0 where none is wanted.
 */
size_t scan_row_bytes(const struct forward *f, int64_t state_width, bool has_decay_rows);
/* Runs the scan over the batch. Closes states, state, state_input, state_output and, of rows, decays. */
void scan_run(struct forward *f, const struct scan *scan);

#endif
