/* Attention of few rows over a cache of keys and values. */
#pragma once
#include "vectors.h"

#define SHARE 8 /* rows that look at a block of keys or values together */
#define TURN 32 /* values in such a block */

/* Scores of G query heads, q [G, 16 N], over sixteen keys [16, 16 N]: scores [G, stride] */
INLINE void score(const int N, const int G, const float *q, const float *keys, float *scores, int64_t stride)
{
    const int64_t dim = LANES * N;
#pragma GCC unroll 4
    for (int g = 0; g < G; g++) {
        v16 s[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            s[i] = load(q + g * dim) * load(keys + i * dim);
#pragma GCC unroll 8
            for (int j = 1; j < N; j++)
                s[i] += load(q + g * dim + j * LANES) * load(keys + i * dim + j * LANES);
        }
        store(scores + g * stride, sums(s));
    }
}

/* e^(score - the largest) over scores [total], in place. Returns their sum. */
INLINE float soften(float *own, int64_t total)
{
    const int64_t padded = (total + LANES - 1) / LANES * LANES;
    for (int64_t t = total; t < padded; t++)
        own[t] = -INFINITY;
    v16 most = load(own), mass = all(0);
    for (int64_t t = LANES; t < padded; t += LANES)
        most = pick(load(own + t) > most, load(own + t), most);
    float largest = most[0];
    for (int j = 1; j < LANES; j++)
        largest = most[j] > largest ? most[j] : largest;
    for (int64_t t = 0; t < padded; t += LANES) {
        v16 s = load(own + t), e = vexp(s - largest);
        e = pick(s == -INFINITY, all(0), e);
        store(own + t, e);
        mass += e;
    }
    return sum(mass);
}

/* Adds `count` values [count, 16 N], weighted, to acc [G][N]. */
INLINE void weigh(const int N, const int G, const float *weights, int64_t stride, const float *values, int64_t count,
                  v16 *acc)
{
    v16 a[4][8];
#pragma GCC unroll 4
    for (int g = 0; g < G; g++)
#pragma GCC unroll 8
        for (int j = 0; j < N; j++)
            a[g][j] = acc[g * N + j];
    for (int64_t t = 0; t < count; t++, values += LANES * N) {
#pragma GCC unroll 4
        for (int g = 0; g < G; g++) {
            v16 weight = all(weights[g * stride + t]);
#pragma GCC unroll 8
            for (int j = 0; j < N; j++)
                a[g][j] += weight * load(values + j * LANES);
        }
    }
#pragma GCC unroll 4
    for (int g = 0; g < G; g++)
#pragma GCC unroll 8
        for (int j = 0; j < N; j++)
            acc[g * N + j] = a[g][j];
}

/* Both for heads of 16 N numbers, G query heads a key head. */
typedef struct {
    void (*score)(const float *, const float *, float *, int64_t);
    void (*weigh)(const float *, int64_t, const float *, int64_t, v16 *);
} Kernels;

#define EACH(DO) DO(1, 1) DO(1, 2) DO(1, 3) DO(1, 4) DO(2, 1) DO(2, 2) DO(2, 3) DO(2, 4) \
                 DO(4, 1) DO(4, 2) DO(4, 3) DO(4, 4) DO(8, 1) DO(8, 2) DO(8, 3) DO(8, 4)
#define DEFINE(N, G)                                                                                                   \
    static void score_##N##_##G(const float *q, const float *keys, float *scores, int64_t stride)                      \
    {                                                                                                                  \
        score(N, G, q, keys, scores, stride);                                                                          \
    }                                                                                                                  \
    static void weigh_##N##_##G(const float *weights, int64_t stride, const float *values, int64_t count, v16 *acc)    \
    {                                                                                                                  \
        weigh(N, G, weights, stride, values, count, acc);                                                              \
    }
EACH(DEFINE)
#define ENTRY(N, G) {score_##N##_##G, weigh_##N##_##G},
static const Kernels KERNELS[] = {EACH(ENTRY)};

static const Kernels *kernels_for(int64_t n, int64_t groups)
{
    return KERNELS + (n == 1 ? 0 : n == 2 ? 4 : n == 4 ? 8 : 12) + groups - 1;
}

/* Queries and what they see: row i has G query heads at q + i * qs over one key head, count[i] new keys beside the
 * context, those named in seen + i * ss. All rows see the first `shared` keys. Results to out + i * os. */
typedef struct {
    const float *q;
    const stored *keys, *values;
    const int32_t *seen, *count;
    float *out;
    int64_t qs, ss, os, context, shared, known; /* known: keys in the cache up to the last that any of the rows sees */
} Queries;

/* `size` stored numbers as float32, in `room` if need be */
INLINE const float *unpacked(const stored *from, int64_t size, float *room)
{
#ifdef HALF
    for (int64_t i = 0; i < size; i += LANES)
        store(room + i, fetch(from + i));
    return room;
#else
    (void)size, (void)room;
    return from;
#endif
}

/* The keys or values that a row sees, from number `first` on, into `room` [count, dim]: the context's, then new ones. */
INLINE void gather(const stored *from, int64_t first, int64_t count, int64_t dim, int64_t context, const int32_t *seen,
                   float *room)
{
    for (int64_t t = first; t < first + count; t++, room += dim) {
        const stored *row = from + dim * (t < context ? t : context + seen[t - context]);
        for (int64_t j = 0; j < dim; j += LANES)
            store(room + j, fetch(row + j));
    }
}

/* n rows, at most SHARE: all but the first find shared keys and values in the first-level cache. A row sums in order of
 * position, and masked keys are not there at all: so a row of a tree sums as the same token decoded alone would.
 * scores: room for [n, G, stride] */
static void attend(int64_t N, int64_t G, const Queries *of, int64_t n, float *scores, int64_t stride)
{
    const Kernels *with = kernels_for(N, G);
    const int64_t dim = LANES * N, whole = of->shared / LANES * LANES, context = of->context, size = G * stride;
    float room[TURN * LANES * 8] __attribute__((aligned(64)));
    v16 acc[SHARE][4 * 8];
    float mass[SHARE][4];
    for (int64_t first = 0; first < whole; first += LANES) {
        const float *keys = unpacked(of->keys + dim * first, dim * LANES, room);
        for (int64_t i = 0; i < n; i++)
            with->score(of->q + i * of->qs, keys, scores + i * size + first, stride);
    }
    for (int64_t i = 0; i < n; i++) {
        const int64_t total = context + of->count[i];
        for (int64_t first = whole; first < total; first += LANES) { /* past the end: scores that are overwritten */
            int64_t count = total - first < LANES ? total - first : LANES;
            gather(of->keys, first, count, dim, context, of->seen + i * of->ss, room);
            with->score(of->q + i * of->qs, room, scores + i * size + first, stride);
        }
        for (int64_t g = 0; g < G; g++)
            mass[i][g] = soften(scores + i * size + g * stride, total);
        for (int64_t j = 0; j < G * N; j++)
            acc[i][j] = all(0);
    }
    for (int64_t first = 0; first < of->shared; first += TURN) {
        const int64_t count = of->shared - first < TURN ? of->shared - first : TURN;
        const float *values = unpacked(of->values + dim * first, dim * count, room);
        for (int64_t i = 0; i < n; i++)
            with->weigh(scores + i * size + first, stride, values, count, acc[i]);
    }
    for (int64_t i = 0; i < n; i++) {
        const int64_t total = context + of->count[i];
        for (int64_t first = of->shared; first < total; first += TURN) {
            int64_t count = total - first < TURN ? total - first : TURN;
            gather(of->values, first, count, dim, context, of->seen + i * of->ss, room);
            with->weigh(scores + i * size + first, stride, room, count, acc[i]);
        }
        for (int64_t j = 0; j < G * N; j++)
            store(of->out + i * of->os + j * LANES, acc[i][j] / mass[i][j / N]);
    }
}
