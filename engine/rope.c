#include "engine/rope.h"

#include <math.h>

/* The dimension that makes `turns` turns over the original context (YaRN, section 3.2). */
static double find_dimension(const struct rope *r, double turns)
{
    return r->rotary_dim * log(r->original_max_position / (turns * 2 * M_PI)) / (2 * log(r->theta));
}

/* How far dimension pair i keeps its frequency (1) or is slowed by the factor (0). */
static float find_share(const struct rope *r, int i)
{
    double low = find_dimension(r, r->beta_fast), high = find_dimension(r, r->beta_slow);
    if (r->truncate) {
        low = floor(low);
        high = ceil(high);
    }
    low = fmax(low, 0);
    high = fmin(high, r->rotary_dim - 1);
    if (low == high)
        high += 0.001; /* as in the reference: no division by zero */
    double ramp = (i - low) / (high - low);
    return (float)(1 - fmin(fmax(ramp, 0), 1));
}

static float find_frequency(const struct rope *r, int i)
{
    float exponent = (float)(2 * i) / (float)r->rotary_dim, period = (float)pow(r->theta, (double)exponent);
    if (!r->yarn)
        return 1.0f / period;
    float kept = find_share(r, i), slowed = (float)(1 / (r->factor * (double)period));
    return slowed * (1 - kept) + 1.0f / period * kept;
}

void rope_fill(const struct rope *rope, int64_t n_positions, float *cosine, float *sine)
{
    int half = rope->rotary_dim / 2;
    for (int i = 0; i < half; i++) {
        float frequency = find_frequency(rope, i);
        for (int64_t p = 0; p < n_positions; p++) {
            double angle = (double)((float)p * frequency);
            cosine[p * half + i] = (float)(cos(angle) * rope->attention_factor);
            sine[p * half + i] = (float)(sin(angle) * rope->attention_factor);
        }
    }
}
