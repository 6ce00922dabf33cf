/* The instructions of a processor's matrix unit: its own, or (-DTILES) the same written in C, by which machines without
 * such a unit test what is written for it. */
#pragma once
#include "vectors.h"

#if defined(HALF) && defined(TILES)
#define UNIT
typedef struct { uint8_t palette, start, unused[14]; uint16_t bytes[16]; uint8_t rows[16]; } Shape;
static __thread struct { Shape shape; uint32_t tile[8][LANES][LANES]; } tiles;

static int matrix_unit_allowed(void) { return 1; }

INLINE void _tile_zero(int t) { memset(tiles.tile[t], 0, sizeof tiles.tile[t]); }
INLINE void _tile_release(void) { memset(&tiles, 0, sizeof tiles); }
INLINE void _tile_loadconfig(const void *shape)
{
    _tile_release();
    memcpy(&tiles.shape, shape, sizeof tiles.shape);
}

static void _tile_loadd(int t, const void *from, int64_t stride)
{
    _tile_zero(t);
    for (int r = 0; r < tiles.shape.rows[t]; r++)
        memcpy(tiles.tile[t][r], (const char *)from + r * stride, tiles.shape.bytes[t]);
}

static void _tile_stored(int t, void *to, int64_t stride)
{
    for (int r = 0; r < tiles.shape.rows[t]; r++)
        memcpy((char *)to + r * stride, tiles.tile[t][r], tiles.shape.bytes[t]);
}

/* Sums of even and of odd products, each in order, then both to the sum. Shapes that do not fit end the process, as in
 * the processor. */
static void _tile_dpbf16ps(int sum, int rows, int columns)
{
    const int depth = tiles.shape.bytes[rows] / 4;
    if (!tiles.shape.palette || tiles.shape.rows[sum] != tiles.shape.rows[rows] || tiles.shape.rows[columns] != depth)
        abort();
    for (int r = 0; r < tiles.shape.rows[sum]; r++) {
        v16 made[2] = {all(0), all(0)};
        for (int k = 0; k < depth; k++) {
            const u16 pair = (u16){0} + tiles.tile[rows][r][k];
            const stored *column = (const stored *)tiles.tile[columns][k];
            made[0] += (v16)(pair << 16) * weights(column, 0);
            made[1] += (v16)(pair & 0xffff0000u) * weights(column, 1);
        }
        float *total = (float *)tiles.tile[sum][r];
        store(total, load(total) + (made[0] + made[1]));
    }
}
#elif defined(HALF) && defined(__AMX_BF16__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define UNIT /* the processor multiplies tiles of 16 by 32 bfloat16 numbers */

/* The kernel wants to be asked. */
static int matrix_unit_allowed(void) { return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18) == 0; }
#else
static int matrix_unit_allowed(void) { return 0; }
#endif
