/* Decoder layers of the Llama family for few rows on a CPU. Compiled at first use by entmtp/target/native.py.
 *
 * A step with few rows is bound by reading the weights once, so everything here serves one stream of packed weights, and
 * one parallel region runs the whole stack of layers. What a row computes does not depend on how many rows there are,
 * nor on the number of threads: every sum has one order. So a token's logits are the same bits whether it was
 * decoded alone, verified in a tree or read in a prefill, and exact acceptance is exact by construction.
 */
#include "attention.h"
#include "attention_unit.h"
#include "choices.h"
#include "products.h"

typedef struct {
    const float *norm1, *norm2;
    Linear qkv, out, up, down;
} Layer;

typedef struct {
    const Layer *layers;
    const float *final_norm, *cos, *sin; /* cos, sin [positions, dim], the first half of sin negated */
    int64_t depth, hidden, heads, kv_heads, dim, inner, rank; /* rank: of the adapters for masks, or 0 */
    double eps;
} Model;

INLINE void norm(const float *x, const float *weight, int64_t n, int64_t size, float eps, float *out)
{
    for (int64_t i = 0; i < n; i++, x += size, out += size) {
        v16 total = all(0);
        for (int64_t j = 0; j < size; j += LANES)
            total += load(x + j) * load(x + j);
        float scale = 1.0f / sqrtf(sum(total) / (float)size + eps);
        for (int64_t j = 0; j < size; j += LANES)
            store(out + j, load(x + j) * scale * load(weight + j));
    }
}

/* x [dim] at its position, in place */
INLINE void rotate(float *x, const float *cos, const float *sin, int64_t dim, float scale)
{
    int64_t half = dim / 2;
    for (int64_t j = 0; j < half; j++) {
        float a = x[j], b = x[j + half];
        x[j] = (a * cos[j] + b * sin[j]) * scale;
        x[j + half] = (b * cos[j + half] + a * sin[j + half]) * scale;
    }
}

INLINE void keep(const float *x, int64_t dim, stored *row)
{
    for (int64_t j = 0; j < dim; j++)
        row[j] = rounded(x[j]);
}

/* Inputs of the layers' widest matrix. */
INLINE int64_t widest(const Model *m)
{
    int64_t wide = m->heads * m->dim > m->hidden ? m->heads * m->dim : m->hidden;
    return filled((wide > m->inner ? wide : m->inner) + m->rank);
}

/* Rows that look at keys and values together, at most; by the matrix unit where heads fill its tiles. */
#ifdef UNIT
enum { TOGETHER = HEIGHT };
INLINE int by_unit(const Model *m) { return m->layers->qkv.unit && m->dim % DEEP == 0; }
#else
enum { TOGETHER = SHARE };
INLINE int by_unit(const Model *m) { return (void)m, 0; }
#define attend_unit attend
#endif

/* Floats of scratch that `forward` needs for n rows. */
int64_t scratch_size(const Model *m, int64_t n, int64_t capacity, int64_t masked, int64_t threads)
{
    int64_t qkv = (m->heads + 2 * m->kv_heads) * m->dim, wide = m->heads * m->dim;
    int64_t rows = n * (m->hidden * (1 + threads) + qkv + wide + m->inner + threads * (widest(m) + m->rank)) + threads * LANES;
    return rows + threads * TOGETHER * m->heads / m->kv_heads * (capacity + LANES) + n * (masked ? n + 1 : 2)
           + 4 * m->depth;
}

/* Final-norm hidden states [n, hidden] of x [n, hidden] at `positions`, whose rows go to `context`, … of the cache
 * [depth, 2, kv_heads, capacity, dim]. A row sees the context and those new rows whose entry in `mask` [n, …] (its columns
 * context, … count) is 0; without a mask itself and the rows before it. Rows from `first` on hold mask tokens. */
void forward(const Model *m, const float *x, const int64_t *positions, int64_t n, int64_t first, int64_t context,
             const stored *mask, int64_t mask_stride, stored *cache, int64_t capacity, float *hidden, float *scratch, int64_t threads)
{
    const int64_t h = m->hidden, d = m->dim, groups = m->heads / m->kv_heads, wide = m->heads * d;
    const int64_t qkv_size = wide + 2 * m->kv_heads * d, stride = capacity + LANES;
    float *residual = scratch, *qkv = residual + n * h, *attended = qkv + n * qkv_size;
    float *active = attended + n * wide, *normed = active + n * m->inner, *panels = normed + threads * n * h;
    float *lows = panels + threads * (n * widest(m) + LANES), *scores = lows + threads * n * m->rank;
    int32_t *count = (int32_t *)(scores + threads * TOGETHER * groups * stride), *seen = count + n;
    int32_t *taken = seen + (mask ? n * n : n);
    const float scale = 1.0f / sqrtf((float)d);
    const int64_t unit = by_unit(m), most = unit ? TOGETHER : SHARE;
    memcpy(residual, x, n * h * sizeof(float));
    memset(taken, 0, 4 * m->depth * sizeof(int32_t));
    for (int64_t i = 0; i < n; i++) {
        if (!mask) { /* all rows share one list */
            seen[i] = (int32_t)i;
            count[i] = (int32_t)i + 1;
            continue;
        }
        count[i] = 0;
        for (int64_t j = 0; j < n; j++)
            if (mask[i * mask_stride + context + j] == 0)
                seen[i * n + count[i]++] = (int32_t)j;
    }
#pragma omp parallel num_threads(threads)
    {
        const int me = omp_get_thread_num(), all_threads = omp_get_num_threads();
        float *own = normed + me * n * h, *panel = panels + me * (n * widest(m) + LANES);
        float *low = lows + me * n * m->rank;
        float *own_scores = scores + me * TOGETHER * groups * stride;
        for (int64_t index = 0; index < m->depth; index++) {
            const Layer *l = m->layers + index;
            int32_t *left = taken + 4 * index;
            stored *keys = cache + (2 * index) * m->kv_heads * capacity * d, *values = keys + m->kv_heads * capacity * d;
            norm(residual, l->norm1, n, h, (float)m->eps, own);
            multiply(&l->qkv, own, n, first, panel, low, qkv, qkv_size, STORE, me, all_threads, left);
#pragma omp barrier
            int64_t vectors = qkv_size / d;
            for (int64_t item = n * vectors * me / all_threads; item < n * vectors * (me + 1) / all_threads; item++) {
                int64_t i = item / vectors, head = item % vectors, key = head - m->heads, value = key - m->kv_heads;
                const float *cos = m->cos + positions[i] * d, *sin = m->sin + positions[i] * d;
                float *vector = qkv + item * d;
                if (value < 0)
                    rotate(vector, cos, sin, d, key < 0 ? scale : 1.0f);
                if (value >= 0)
                    keep(vector, d, values + (value * capacity + context + i) * d);
                else if (key >= 0)
                    keep(vector, d, keys + (key * capacity + context + i) * d);
            }
#pragma omp barrier
            int64_t items = n * m->kv_heads, item = items * me / all_threads, end = items * (me + 1) / all_threads;
            while (item < end) { /* rows of one head, as many as share */
                int64_t head = item / n, i = item % n, rows = n - i < end - item ? n - i : end - item;
                rows = rows < most ? rows : most;
                for (int64_t g = 0; g < groups; g += 4) {
                    int64_t at = (head * groups + g) * d;
                    Queries of = {qkv + i * qkv_size + at, keys + head * capacity * d, values + head * capacity * d,
                                  mask ? seen + i * n : seen, count + i, attended + i * wide + at, qkv_size,
                                  mask ? n : 0, wide, context, mask ? context : context + i + 1,
                                  context + (mask ? n : i + rows)};
                    (unit ? attend_unit : attend)(d / LANES, groups - g < 4 ? groups - g : 4, &of, rows, own_scores,
                                                  stride);
                }
                item += rows;
            }
#pragma omp barrier
            multiply(&l->out, attended, n, first, panel, low, residual, h, ADD, me, all_threads, left + 1);
#pragma omp barrier
            norm(residual, l->norm2, n, h, (float)m->eps, own);
            multiply(&l->up, own, n, first, panel, low, active, m->inner, GATE, me, all_threads, left + 2);
#pragma omp barrier
            multiply(&l->down, active, n, first, panel, low, residual, h, ADD, me, all_threads, left + 3);
#pragma omp barrier
        }
        for (int64_t i = n * me / all_threads; i < n * (me + 1) / all_threads; i++)
            norm(residual + i * h, m->final_norm, 1, h, (float)m->eps, hidden + i * h);
    }
}
