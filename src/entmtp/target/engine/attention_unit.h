/* Attention of few rows by the matrix unit: queries, keys, weights and values meet in bfloat16, sums are float32. */
#pragma once
#include "attention.h"
#include "products.h"
#ifdef UNIT

enum { RUN = 8, WIDTH = 4 }; /* blocks of values that are packed at a time; tiles of 16 of their numbers */
#define WRITTEN __asm__ volatile("" ::: "memory") /* gcc's tile instructions do not say what memory they read */

/* Sixteen keys [16, dim] as [dim / 2][16][2] */
static void pack_keys(const stored *keys, int64_t dim, stored *packed)
{
    for (int64_t d = 0; d < dim; d += DEEP, packed += DEEP * LANES) {
        v16 v[LANES]; /* pairs of numbers, only moved */
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            v[i] = load((const float *)(keys + i * dim + d));
        transpose(v);
#pragma GCC unroll 16
        for (int j = 0; j < LANES; j++)
            store((float *)packed + j * LANES, v[j]);
    }
}

/* The 32 values that row i sees from number `first` on, 16 `width` numbers of each from `from` on, as
 * [width][16][16][2]; those that are not there are zeros. */
static void pack_values(const Queries *of, const stored *from, int64_t dim, int64_t width, int64_t i, int64_t first,
                        stored *packed)
{
    static const stored none[WIDTH * LANES];
    const int32_t *seen = of->seen + i * of->ss;
    const int64_t total = of->context + of->count[i];
    for (int64_t t = 0; t < DEEP; t += PAIR, packed += PAIR * LANES) {
        const stored *row[PAIR];
        for (int64_t p = 0; p < PAIR; p++) {
            const int64_t key = first + t + p;
            row[p] = key < of->context ? from + dim * key
                   : key < total       ? from + dim * (of->context + seen[key - of->context]) : none;
        }
        for (int64_t j = 0; j < width; j++) {
            const u16 low = __builtin_convertvector(*(const h16 *)(row[0] + j * LANES), u16);
            const u16 high = __builtin_convertvector(*(const h16 *)(row[1] + j * LANES), u16);
            *(u16 *)(packed + j * DEEP * LANES) = low | high << 16;
        }
    }
}

/* `total` weights of float32 as bfloat16, in place; zeros up to a multiple of 32 */
static void halve(float *own, int64_t total)
{
    stored *to = (stored *)own;
    for (int64_t t = 0; t < (total + DEEP - 1) / DEEP * DEEP; t += LANES) {
        const u16 bits = (u16)load(own + t);
        const h16 half = __builtin_convertvector((bits + 0x7fff + (bits >> 16 & 1)) >> 16, h16);
        *(h16 *)(to + t) = t < total ? half : (h16){0};
    }
}

/* An instruction names its tile registers by literal numbers: here for each of 0 to 3 below a limit. */
#define EACH_TILE(DO) DO(0) DO(1) DO(2) DO(3)

/* Tile registers 0 to `width` - 1, the sums [width][rows][16], from or to memory */
INLINE void open_sums(const float *sums, int64_t size, int64_t width)
{
    WRITTEN;
#define OPEN(T)                                                                                                        \
    if (T < width)                                                                                                     \
        _tile_loadd(T, sums + T * size, 64);
    EACH_TILE(OPEN)
#undef OPEN
}

INLINE void close_sums(float *sums, int64_t size, int64_t width)
{
#define CLOSE(T)                                                                                                       \
    if (T < width)                                                                                                     \
        _tile_stored(T, sums + T * size, 64);
    EACH_TILE(CLOSE)
#undef CLOSE
}

/* One block of 32 packed values, weighted by [rows][32], `stride` bytes from row to row, to the sums */
INLINE void weigh_block(const stored *packed, const stored *weights, int64_t stride, int64_t width)
{
    _tile_loadd(5, weights, stride);
#define WEIGH(T)                                                                                                       \
    if (T < width) {                                                                                                   \
        _tile_loadd(4, packed + T * DEEP * LANES, 64);                                                                 \
        _tile_dpbf16ps(T, 5, 4);                                                                                       \
    }
    EACH_TILE(WEIGH)
#undef WEIGH
}

/* Scores of all queries q [n G, dim] over the first `known` keys, seen or not: scores [n G, stride] */
static void score_unit(const stored *q, const int64_t *start, int64_t tiles, int64_t G, int64_t dim, const Queries *of,
                       float *scores, int64_t stride)
{
    stored packed[LANES * LANES * 8] __attribute__((aligned(64)));
    for (int64_t first = 0; first < of->known; first += LANES) { /* past the end: scores that are overwritten */
        pack_keys(of->keys + first * dim, dim, packed);
        WRITTEN;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t d = 0; d < dim; d += DEEP) {
            _tile_loadd(4, packed + d * LANES, 64);
#define TILE(T, A)                                                                                                     \
    if (T < tiles) {                                                                                                   \
        _tile_loadd(A, q + start[T] * G * dim + d, dim * sizeof(stored));                                              \
        _tile_dpbf16ps(T, A, 4);                                                                                       \
    }
            TILE(0, 5) TILE(1, 6) TILE(2, 7) TILE(3, 5)
#undef TILE
        }
#define PUT(T)                                                                                                         \
    if (T < tiles)                                                                                                     \
        _tile_stored(T, scores + start[T] * G * stride + first, stride * sizeof(float));
        EACH_TILE(PUT)
#undef PUT
    }
}

/* As `attend`, for HEIGHT rows at most. Scores are computed densely, then each row keeps those that it sees; values are
 * added in blocks of 32 by position, those of the context for all rows at once and then a row's own. An instruction's
 * result for a row depends on that row's block alone, so here as well a row of a tree sums as the same token alone. */
static void attend_unit(int64_t N, int64_t G, const Queries *of, int64_t n, float *scores, int64_t stride)
{
    const int64_t dim = LANES * N, most = HEIGHT / G, tiles = (n + most - 1) / most, each = (n + tiles - 1) / tiles;
    const int64_t rows = each * G, size = rows * LANES, whole = of->shared / DEEP * DEEP;
    stored q[HEIGHT * WIDTH * LANES * 8] __attribute__((aligned(64)));
    stored packed[RUN * WIDTH * DEEP * LANES] __attribute__((aligned(64)));
    stored alone[HEIGHT * DEEP] __attribute__((aligned(64))) = {0};
    float sums[AT_ONCE][WIDTH * HEIGHT * LANES] __attribute__((aligned(64))), mass[HEIGHT][4];
    int64_t start[AT_ONCE]; /* of each tile's rows; the last tile overlaps the one before where rows are left over */
    for (int64_t t = 0; t < tiles; t++)
        start[t] = t * each < n - each ? t * each : n - each;
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < G * dim; j++)
            q[i * G * dim + j] = rounded(of->q[i * of->qs + j]);
    unit_begin(rows);
    score_unit(q, start, tiles, G, dim, of, scores, stride);
    for (int64_t i = 0; i < n; i++)
        for (int64_t g = 0; g < G; g++) {
            float *own = scores + (i * G + g) * stride, *fresh = own + of->context;
            for (int64_t j = 0; j < of->count[i]; j++)
                fresh[j] = fresh[of->seen[i * of->ss + j]];
            mass[i][g] = soften(own, of->context + of->count[i]);
            halve(own, of->context + of->count[i]);
        }
    for (int64_t at = 0; at < N; at += WIDTH) {
        const int64_t width = N - at < WIDTH ? N - at : WIDTH, block = width * DEEP * LANES;
        const stored *values = of->values + at * LANES;
        memset(sums, 0, tiles * sizeof sums[0]);
        for (int64_t first = 0; first < whole; first += RUN * DEEP) {
            const int64_t blocks = whole - first < RUN * DEEP ? (whole - first) / DEEP : RUN;
            for (int64_t b = 0; b < blocks; b++)
                pack_values(of, values, dim, width, 0, first + b * DEEP, packed + b * block);
            for (int64_t t = 0; t < tiles; t++) {
                const stored *weights = (const stored *)(scores + start[t] * G * stride) + first;
                open_sums(sums[t], size, width);
                for (int64_t b = 0; b < blocks; b++)
                    weigh_block(packed + b * block, weights + b * DEEP, stride * sizeof(float), width);
                close_sums(sums[t], size, width);
            }
        }
        for (int64_t t = 0; t < tiles; t++) {
            open_sums(sums[t], size, width);
            for (int64_t i = start[t]; i < start[t] + each; i++) {
                stored *mine = alone + (i - start[t]) * G * DEEP;
                for (int64_t first = whole; first < of->context + of->count[i]; first += DEEP) {
                    pack_values(of, values, dim, width, i, first, packed);
                    for (int64_t g = 0; g < G; g++)
                        memcpy(mine + g * DEEP, (const stored *)(scores + (i * G + g) * stride) + first, 2 * DEEP);
                    WRITTEN;
                    weigh_block(packed, alone, 2 * DEEP, width);
                }
                memset(mine, 0, G * DEEP * sizeof(stored));
            }
            close_sums(sums[t], size, width);
            for (int64_t r = 0; r < rows; r++) {
                const int64_t i = start[t] + r / G, g = r % G;
                for (int64_t j = 0; j < width; j++)
                    store(of->out + i * of->os + g * dim + (at + j) * LANES,
                          load(sums[t] + j * size + r * LANES) / mass[i][g]);
            }
        }
    }
    _tile_release();
}
#endif
