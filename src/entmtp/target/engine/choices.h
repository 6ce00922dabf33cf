/* What is asked of logits: the largest, where it is, and how much of the probability it has. */
#pragma once
#include "vectors.h"

#define LOWEST (-3.0e38f)

/* Lanes j, … of x [n], LOWEST past its end. */
INLINE v16 some(const float *x, int64_t j, int64_t n)
{
    if (j + LANES <= n)
        return load(x + j);
    v16 left = all(LOWEST);
    for (int64_t k = 0; k < n - j; k++)
        left[k] = x[j + k];
    return left;
}

INLINE float largest(const float *x, int64_t n)
{
    v16 most[4] = {all(LOWEST), all(LOWEST), all(LOWEST), all(LOWEST)}; /* four chains: a comparison takes some cycles */
    for (int64_t j = 0; j < n; j += 4 * LANES)
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) {
            v16 v = j + c * LANES < n ? some(x, j + c * LANES, n) : all(LOWEST);
            most[c] = pick(v > most[c], v, most[c]);
        }
    float found = LOWEST;
    for (int c = 0; c < 4; c++)
        for (int k = 0; k < LANES; k++)
            found = most[c][k] > found ? most[c][k] : found;
    return found;
}

/* Largest softmax probability of each row of x [rows, n]: 1 / sum exp(x - max), every sum in one order. */
void top1(const float *x, int64_t rows, int64_t n, float *out)
{
    for (int64_t i = 0; i < rows; i++, x += n) {
        const float most = largest(x, n);
        v16 total[2] = {all(0), all(0)};
        for (int64_t j = 0; j < n; j += 2 * LANES)
#pragma GCC unroll 2
            for (int c = 0; c < 2; c++)
                if (j + c * LANES < n)
                    total[c] += vexp(some(x, j + c * LANES, n) - most);
        out[i] = 1.0f / sum(total[0] + total[1]);
    }
}

/* The first place of the largest of x [n]. */
int64_t first_largest(const float *x, int64_t n)
{
    const float most = largest(x, n);
    for (int64_t j = 0; j < n; j += LANES) {
        i16 here = some(x, j, n) == most;
        if (sum(pick(here, all(1), all(0))) > 0)
            for (int k = 0; k < LANES; k++)
                if (here[k])
                    return j + k;
    }
    return 0; /* not a number among them */
}
