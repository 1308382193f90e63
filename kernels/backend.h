/* The seam between models and machines: a table of operations that a backend fills.
 *
 * The engine's forward passes call these and nothing else; they never look at what a tensor's data points to. The CPU's
 * table is filled in kernels/cpu, CUDA's in kernels/cuda.
 *
 * Conventions, for every operation:
 *   - Shapes stand beside each tensor: T tokens of a batch packed end to end, D hidden_size, H heads, P head_dim,
 *     N state_dim, C channels (Mamba's inner width), G groups, E experts, K top_k, V vocabulary.
 *   - Activations are DTYPE_F32 or DTYPE_BF16; arithmetic is float32 inside (GEMMs of bfloat16 inputs accumulate in
 *     float32) and is rounded once, to nearest even, when an output tensor of DTYPE_BF16 is written. Vectors marked
 *     float are float32 whatever the load.
 *   - Outputs may not overlap inputs unless a comment says so. Rows past `rows` of an output may be overwritten up to
 *     the next multiple of BACKEND_ROW_PADDING (workspaces are planned with them); no input is read there.
 *   - The result of a token never depends on the tokens of other runs, and on its place in the batch only by rounding.
 *   - Operations return nothing. A failure is kept in the backend, the first one wins, later operations do nothing,
 *     and `synchronize` returns it. A forward pass therefore reads like the architecture it follows.
 *   - Threads: one thread drives a backend. It may use more inside (the CPU's: OpenMP). */
#ifndef ACTDUMP_KERNELS_BACKEND_H
#define ACTDUMP_KERNELS_BACKEND_H

#include "kernels/base/error.h"
#include "kernels/base/tensor.h"

/* Row counts of workspaces are rounded up to this, so that GEMMs may run over whole tiles. */
#define BACKEND_ROW_PADDING 64

struct backend;
/* A weight matrix as its backend likes it best: packed, converted, on the device. Owned by who created it. */
struct matrix;

/* One stretch of consecutive tokens of one document in a batch. Convolutions, scans and attention start anew at each
 * run, except where a run continues one of an earlier batch (corpus.carry). */
struct run {
    int32_t start;    /* first row in the batch */
    int32_t length;   /* tokens, at least 1 */
    int32_t position; /* of its first token in the document's run; > 0 only where it continues an earlier batch */
};

struct runs {
    const struct run *list; /* host memory; ascending, without gaps */
    int64_t n;
    bool carry_in;  /* list[0] continues the state that the carry buffer holds */
    bool carry_out; /* the state after the last run's last token is left in the carry buffer */
};

/* Rows of a batch for which a large intermediate is to be written out. Row i of the output is batch row index[i]. */
struct row_list {
    const int32_t *index; /* host memory; ascending */
    int64_t n;
};

struct conv_args {
    struct tensor x;     /* [T, C] */
    const float *weight; /* [kernel, C]: tap-major; tap kernel-1 multiplies the token itself */
    const float *bias;   /* [C] or NULL */
    int kernel;          /* taps, 1 or more */
    struct runs runs;
    float *tail;     /* [kernel-1, C] carry: the last inputs of the carried run, oldest first; NULL without carry */
    struct tensor y; /* [T, C] silu(conv(x) + bias); rounded to x's dtype before silu is not done */
};

/* Mamba-1's selective scan (Gu and Dao 2023, section 3; transformers modeling_mamba.py, mamba_selective_scan):
 *   beta = softplus(dt + dt_bias)          h = exp(beta * A) * h + beta * B * x
 *   head_output = C . h + D * x            y = head_output * silu(z)                       all in float32 */
struct selective_scan_args {
    struct tensor x;         /* [T, C] after convolution and silu */
    struct tensor dt;        /* [T, C] before bias and softplus */
    struct tensor B, C;      /* [T, N] */
    struct tensor z;         /* [T, C] gate; data NULL: no gate */
    const float *dt_bias;    /* [C] */
    const float *A;          /* [N, C]: state-major, -exp(A_log) */
    const float *D;          /* [C] */
    int state_dim;           /* N */
    struct runs runs;        /* clipped by the caller where it works in pieces of a batch */
    float *carry;            /* [N, C] state in and out, see struct runs; NULL where neither is asked for */
    struct tensor y;         /* [T, C]; may be x */
    struct tensor betas;     /* [T, C] float32, optional */
    struct tensor outputs;   /* [T, C] head outputs, float32, optional */
    struct row_list state_rows;
    struct tensor states;    /* [state_rows.n, C * N] float32, channel-major: [channel][state]; optional */
    struct row_list decay_rows;
    struct tensor decays;    /* [decay_rows.n, C * N] float32, beta * A, channel-major; optional */
};

/* Mamba-2's SSD (Dao and Gu 2024, section 6; transformers modeling_bamba.py, mamba2_chunk_scan). Head h uses group
 * h / (H / G) of B and C:
 *   beta = clamp(softplus(dt + dt_bias), limit)    S = exp(beta * A) * S + beta * B (outer) x
 *   y = C . S + D * x                                                                      all in float32
 * On a CPU this and selective_scan take numbers below 2^-126 for zeros, read and made; attention does so in
 * scores of bfloat16 where the processor multiplies those itself. */
struct ssd_scan_args {
    struct tensor x;      /* [T, H * P] */
    struct tensor dt;     /* [T, H] before bias and softplus */
    struct tensor B, C;   /* [T, G * N] */
    const float *dt_bias; /* [H] */
    const float *A;       /* [H], -exp(A_log) */
    const float *D;       /* [H] */
    int n_heads, head_dim, state_dim, n_groups;
    float dt_min, dt_max; /* time_step_limit; dt_max may be INFINITY */
    int chunk;            /* tokens a chunk; the result depends on it by rounding only */
    struct runs runs;
    float *carry;         /* [H, N, P] */
    struct tensor y;      /* [T, H * P] */
    struct tensor betas;  /* [T, H] float32, optional */
    struct row_list state_rows;
    struct tensor states; /* [state_rows.n, H * N * P] float32: [head][state][head_dim]; optional */
};

/* Causal softmax(q k^T * scale) v over each run, block-diagonal, grouped heads: query head h reads key/value head
 * h / (H / H_kv). Key row of batch row t is t + past: with carry the first `past` key rows belong to list[0]. */
struct attention_args {
    struct tensor q;      /* [T, H * P] */
    struct tensor k, v;   /* [past + T, H_kv * P] */
    int n_heads, n_kv_heads, head_dim;
    int64_t past;         /* key rows in front of the batch's own, all of the carried run; 0 without carry */
    int64_t window;       /* a query sees itself and window - 1 keys before it; 0: all */
    float scale;
    struct runs runs;
    struct tensor y;      /* [T, H * P] */
    struct row_list pattern_rows;
    int64_t n_keys;       /* key axis of scores and probabilities: positions of the document's run, from 0 */
    struct tensor scores; /* [pattern_rows.n, H * n_keys] float32 or bfloat16: scaled, -inf where hidden; optional */
    struct tensor probabilities; /* the same shape, 0 where hidden; optional */
};

enum router { ROUTER_SOFTMAX, ROUTER_SIGMOID };

/* ROUTER_SOFTMAX: softmax over all experts, top K, not renormalized (transformers modeling_jamba.py,
 * JambaTopKRouter). ROUTER_SIGMOID: optional tanh softcap, sigmoid, top K by score + selection bias, weights are the
 * scores without the bias, renormalized to sum 1 (modeling_laguna.py, LagunaTopKRouter). Equal scores: lower index
 * first. Slots are in order of falling selection score. */
struct route_args {
    struct tensor logits; /* [T, E] float32 or bfloat16 */
    enum router router;
    int top_k;
    float softcap;               /* 0: none */
    const float *selection_bias; /* [E] or NULL */
    struct tensor weights;       /* [T, K] */
    struct tensor indices;       /* [T, K] int32 */
};

/* Slots of a batch (slot t * K + j: token t's j-th choice) ordered by expert: order[i] is the slot in place i; expert e
 * owns places [offsets[e], offsets[e+1]). Within an expert, slots ascend. */
struct expert_groups {
    int32_t *order;   /* [T * K], the backend's memory */
    int32_t *places;  /* [T * K]: the inverse, place of each slot */
    int32_t *offsets; /* [E + 1] */
    int n_experts, top_k;
    int64_t n_tokens;
};

struct norm_args {
    struct tensor x;      /* [T, width] */
    struct tensor gate;   /* [T, width]: x * silu(gate) is normed (Mamba-2's gated norm); data NULL: no gate */
    const float *weight;  /* [width], or [group] shared by all groups where weight_per_group */
    int64_t group;        /* columns normed together; width for a plain norm, head_dim for q_norm */
    bool weight_per_group;
    float epsilon;
    struct tensor y; /* [T, width] x / sqrt(mean(x^2) + epsilon) * weight; may be x itself */
};

struct rotary_args {
    struct tensor x;          /* [T, heads * head_dim], in place */
    int n_heads, head_dim;
    int rotary_dim;           /* the first rotary_dim of each head turn (halves paired); the rest passes */
    const float *cosine, *sine; /* [max_position, rotary_dim / 2], attention factor included */
    struct runs runs;         /* positions restart at each run, at run.position */
};

struct backend_ops {
    /* Ends the backend and its memory; backend_destroy calls it. */
    void (*destroy)(struct backend *b);
    /* Memory of the backend. allocate returns zeroed memory that release takes (NULL is fine). upload and download
     * move bytes from and to the host: when they return, the host's bytes may be changed, or are there. */
    enum status (*allocate)(struct backend *b, void **out, size_t bytes, const char *what, struct error *error);
    void (*release)(struct backend *b, void *memory);
    void (*upload)(struct backend *b, void *to, const void *from_host, size_t bytes);
    void (*download)(struct backend *b, void *to_host, const void *from, size_t bytes);
    /* Waits for all operations; returns the first failure since the last call, and forgets it. */
    enum status (*synchronize)(struct backend *b, struct error *error);

    /* Weights: w is [N, K] in host memory, any float dtype, as it lies in the file; compute is the load's dtype.
     * Returns owned at *out. Where the load's dtype is bfloat16 values are rounded to it first. */
    enum status (*matrix_create)(struct backend *b, const struct tensor *w, enum dtype compute, const char *name,
                                 struct matrix **out, struct error *error);
    void (*matrix_destroy)(struct backend *b, struct matrix *matrix); /* NULL is fine */
    /* Bytes that matrix_create will keep for [n, k] at that dtype, for plans made before any weight is read. */
    size_t (*matrix_bytes)(struct backend *b, int64_t n, int64_t k, enum dtype compute);

    /* out[t] = table[ids[t]]; ids int32 in the backend's memory, already checked against table.rows. */
    void (*embed)(struct backend *b, struct tensor table /* [V, D] */, const int32_t *ids, struct tensor out);
    /* y = x w^T + bias + addend. bias [N] float or NULL; addend [T, N] (may be y itself) or data NULL. */
    void (*linear)(struct backend *b, struct tensor x /* [T, K] */, const struct matrix *w, const float *bias,
                   struct tensor addend, struct tensor y /* [T, N] */);
    void (*rms_norm)(struct backend *b, const struct norm_args *args);
    /* out = x + y; out may be x or y. */
    void (*add)(struct backend *b, struct tensor x, struct tensor y, struct tensor out);
    /* out = x + y * scale; out may be x or y (the mixture's routed scaling). */
    void (*add_scaled)(struct backend *b, struct tensor x, struct tensor y, float scale, struct tensor out);
    /* y = silu(gate) * up; activation = silu(gate), optional. y may be gate or up. */
    void (*silu_mul)(struct backend *b, struct tensor gate, struct tensor up, struct tensor activation,
                     struct tensor y);
    void (*conv_silu)(struct backend *b, const struct conv_args *args);
    void (*selective_scan)(struct backend *b, const struct selective_scan_args *args);
    void (*ssd_scan)(struct backend *b, const struct ssd_scan_args *args);
    void (*rotary)(struct backend *b, const struct rotary_args *args);
    void (*attention)(struct backend *b, const struct attention_args *args);
    /* y = x * softplus(gate), gate [T, H] (a head shares one) or [T, H * P]; y may be x. */
    void (*softplus_gate)(struct backend *b, struct tensor x /* [T, H * P] */, struct tensor gate, int head_dim,
                          struct tensor y);
    void (*route)(struct backend *b, const struct route_args *args);
    void (*group_experts)(struct backend *b, struct tensor indices /* [T, K] int32 */, struct expert_groups *groups);
    /* Rows of each expert times that expert's matrix: one GEMM for each expert that has tokens. */
    void (*grouped_linear)(struct backend *b, struct tensor xg /* [T * K, D] */, const struct expert_groups *groups,
                           struct matrix *const *experts /* [E] */, struct tensor yg);
    /* The same where place i has its token's row of x: order[i] / K. xg is memory to bring them together in, which
     * afterwards holds them or anything else. */
    void (*gathered_linear)(struct backend *b, struct tensor x /* [T, D] */, const struct expert_groups *groups,
                            struct matrix *const *experts, struct tensor xg /* [T * K, D] */, struct tensor yg);
    /* out[t] = scale * sum over t's slots of weights[t, j] * yg[place], summed in slot order. */
    void (*combine_slots)(struct backend *b, struct tensor yg, const struct expert_groups *groups,
                          struct tensor weights /* [T, K] */, float scale, struct tensor out /* [T, D] */);
    /* out[i] = the K slots of token rows.index[i] side by side, each times its weight (weights.data NULL: as it is). */
    void (*ungroup_slots)(struct backend *b, struct tensor yg, const struct expert_groups *groups,
                          struct tensor weights, struct row_list rows, struct tensor out /* [rows.n, K * width] */);
    /* y = softmax over each row of x, float32. */
    void (*softmax)(struct backend *b, struct tensor x, struct tensor y);
    /* out[i] = x[rows.index[i]], converted to out's dtype; both in the backend's memory. */
    void (*gather_rows)(struct backend *b, struct tensor x, struct row_list rows, struct tensor out);
    /* The capture's way out: host[i] = x[rows[i]] as `dtype`, i < n, rows of x.cols elements end to end. `rows` NULL:
     * all rows in order. Complete after synchronize. */
    void (*collect)(struct backend *b, struct tensor x, const int32_t *rows, int64_t n, enum dtype dtype, void *host);
};

/* Posts that a backend holds at most. */
#define BACKEND_MAX_POSTS 512

/* The capture's way out of a device, where nobody is to wait for it: rows are posted behind the operations that make
 * them, and taken, in the order of posting, once they have come. In between they lie in a ring that the backend keeps.
 * Threads: posts come from the thread that drives the backend; one other thread may take. */
struct backend_captures {
    /* Makes the ring at least `bytes` long, in host and in device memory each; a post takes at most a quarter of it.
     * Only while it is empty. */
    enum status (*reserve)(struct backend *b, size_t bytes, struct error *error);
    /* As collect, with float16 as a dtype too; n >= 1. False where the ring has no room (take first), or after a
     * failure. */
    bool (*post)(struct backend *b, struct tensor x, const int32_t *rows, int64_t n, enum dtype dtype);
    /* Copies the next `bytes` of what was posted to the host, and waits for these alone. n_overflow grows by the
     * elements of float16 posts that were finite and are infinite as float16, when the last byte of one is taken. */
    enum status (*take)(struct backend *b, void *host, size_t bytes, int64_t *n_overflow, struct error *error);
    /* Forgets what was posted and not taken, after waiting for it. */
    void (*drop)(struct backend *b);
};

struct backend {
    const struct backend_ops *ops;
    const struct backend_captures *captures; /* NULL: the memory is the host's, and `collect` is done at once */
    char name[64];      /* "cpu (AVX2, 2 threads)": for logs and store.json */
    bool is_host;       /* its memory is the host's */
    int n_threads;      /* CPU threads that its operations use */
    struct error error; /* the first failure since the last synchronize */
};

/* Backends are made by name. threads: 0 is every processor that this process may run on. Returns owned. */
enum status backend_create_cpu(int n_threads, struct backend **out, struct error *error);
void backend_destroy(struct backend *backend); /* NULL is fine */

#endif
