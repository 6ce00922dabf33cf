/* Sixteen numbers at a time, by gcc's vector types: whatever the processor has, these become its widest instructions. */
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <omp.h>

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

typedef float v16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t i16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t u16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t h16 __attribute__((vector_size(32), aligned(2), may_alias));

INLINE v16 load(const float *p) { return *(const v16 *)p; }
INLINE void store(float *p, v16 v) { *(v16 *)p = v; }
INLINE v16 all(float x) { return x - (v16){0}; }

/* Weights, keys and values are stored as float32 or (-DHALF) bfloat16; all arithmetic is float32, but for what the
 * matrix unit multiplies: bfloat16 by bfloat16, added in float32. */
#ifdef HALF
typedef uint16_t stored;
#define PAIR 2  /* inputs whose weights lie side by side, as the matrix unit wants them */
#define DEEP 32 /* inputs are filled up to a multiple with zeros */
INLINE v16 fetch(const stored *p) { return (v16)(__builtin_convertvector(*(const h16 *)p, u16) << 16); }
INLINE v16 weights(const stored *p, int which)
{
    u16 both = *(const u16 *)p;
    return which ? (v16)(both & 0xffff0000u) : (v16)(both << 16);
}
INLINE stored rounded(float x) /* to nearest, ties to even */
{
    union { float f; uint32_t u; } bits = {x};
    return (stored)((bits.u + 0x7fff + (bits.u >> 16 & 1)) >> 16);
}
#else
typedef float stored;
#define PAIR 1
#define DEEP 1
INLINE v16 fetch(const stored *p) { return load(p); }
INLINE v16 weights(const stored *p, int which) { (void)which; return load(p); }
INLINE stored rounded(float x) { return x; }
#endif
INLINE v16 pick(i16 mask, v16 a, v16 b) { return (v16)((mask & (i16)a) | (~mask & (i16)b)); }

INLINE float sum(v16 v)
{
    typedef float v8 __attribute__((vector_size(32)));
    typedef float v4 __attribute__((vector_size(16)));
    union { v16 v; v8 h[2]; } a = {v};
    union { v8 v; v4 h[2]; } b = {a.h[0] + a.h[1]};
    v4 c = b.h[0] + b.h[1];
    return (c[0] + c[2]) + (c[1] + c[3]);
}

/* Lane j of the result is the sum of v[j], always in the same order: four rounds of adding neighbours, v changed. */
INLINE v16 sums(v16 v[LANES])
{
    const i16 even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30}, odd = even + 1;
#pragma GCC unroll 4
    for (int left = LANES / 2; left; left /= 2)
#pragma GCC unroll 8
        for (int j = 0; j < left; j++) {
            v16 a = v[2 * j], b = v[2 * j + 1];
            v[j] = __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, odd);
        }
    return v[0];
}

/* v[i][j] <-> v[j][i] */
INLINE void transpose(v16 v[LANES])
{
    const i16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#pragma GCC unroll 4
    for (int step = 1; step < LANES; step *= 2) {
        const i16 second = (lane & step) != 0; /* -1 where a lane's number has this bit */
        const i16 low = lane + (second & (LANES - step)), high = lane + step + (second & (LANES - step));
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            if (!(i & step)) {
                v16 a = v[i], b = v[i + step];
                v[i] = __builtin_shuffle(a, b, low);
                v[i + step] = __builtin_shuffle(a, b, high);
            }
    }
}

/* e^x, below 2e-7 relative error; flushed to 2^-126 and clamped at 2^127 */
INLINE v16 vexp(v16 x)
{
    v16 y = x * 1.4426950408889634f;
    y = pick(y < -126.0f, all(-126.0f), y);
    y = pick(y > 126.99f, all(126.99f), y);
    v16 shifted = y + 12582912.0f; /* 1.5 * 2^23: the sum's last bits are y, rounded to an integer */
    v16 f = y - (shifted - 12582912.0f);
    i16 whole = (i16)shifted - (i16)all(12582912.0f);
    v16 p = 1.0f + f * (0.6931471805599453f + f * (0.2402265069591007f + f * (0.05550410866482158f
          + f * (0.009618129107628477f + f * (0.0013333558146428441f + f * 0.00015403530393381608f)))));
    return p * (v16)((whole + 127) << 23);
}
