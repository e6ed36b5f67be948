/* Weights in codes of 4 or 8 bits, of which 16 or 32 inputs of an output share a scale and perhaps a least value.
 *
 * Panels consist of blocks of 32 inputs, whose 1,024 numbers come in the order in which panels of `elem` have them:
 *
 *     scales[32 / group][32]   leasts[32 / group][32], if there are any   codes[1024]
 *
 * Codes of 8 bits are bytes. Those of 4 bits come in runs of 128: bits 4 k .. 4 k + 3 of word l are number 16 k + l, so
 * shifting a vector of words gives neighbouring codes in its lanes.
 *
 * A slice of a panel is widened in the L1 cache and multiplied like any other. A code times its scale is exact in
 * float32, so the numbers are the same, bit for bit, as if the whole matrix were widened beforehand.
 */
#include "gemm.h"

#define SLICE (512 / (int)sizeof(elem)) /* inputs: 16 KB of `elem` */
#define PERIOD (PANEL * PAIR)           /* numbers after which the outputs repeat */
#define RUN 128                         /* numbers of 16 words of codes of 4 bits */
#define AHEAD 4096                      /* prefetch distance in bytes */

/* Repeat a scale of each output for each input of a pair. */
static inline void spread(const char *from, int scale_bytes, float *to)
{
    for (int r = 0; r < PANEL; r += LANES) {
        vf each = scale_bytes == 2 ? vload_half((const uint16_t *)from + r) : vload((const float *)from + r);
#if PAIR == 1
        vstore(to + r, each);
#elif defined(__AVX512F__)
        __m512i half = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
        vstore(to + 2 * r, (vf)_mm512_permutexvar_ps(half, (__m512)each));
        vstore(to + 2 * r + LANES, (vf)_mm512_permutexvar_ps(_mm512_add_epi32(half, _mm512_set1_epi32(8)), (__m512)each));
#else
        for (int lane = 0; lane < LANES; lane++)
            to[2 * (r + lane)] = to[2 * (r + lane) + 1] = each[lane];
#endif
    }
}

static inline void store_neighbours(elem *to, vf first, vf second)
{
#if defined(RAYDIX_BF16) && defined(__AVX512BF16__)
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
#else
    vstore_elem(to, first);
    vstore_elem(to + LANES, second);
#endif
}

/* Return the floats of vector number `vector` of a run, whose words are given. */
static inline __attribute__((always_inline)) vf floats_of_run(const vu *words, int vector)
{
#if defined(__AVX512F__) /* A table look-up reads the lowest bits of its indices, and saves the conversion. */
    const __m512 codes = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    __m512i word = (__m512i)(words[0] >> 4 * vector);
    /* While tiles multiply, one port does all products and shifts of vectors. Shuffles of bytes use another one. */
    if (vector && vector % 2 == 0)
        word = _mm512_shuffle_epi8((__m512i)words[0], _mm512_set4_epi32(12 + vector / 2, 8 + vector / 2,
                                                                        4 + vector / 2, vector / 2));
    return (vf)_mm512_permutexvar_ps(word, codes);
#else
    int number = vector * LANES;
    vu shifted = words[number % 16 / LANES] >> 4 * (number / 16);
    return __builtin_convertvector((vi)(shifted & 15), vf);
#endif
}

static inline __attribute__((always_inline)) vf scaled(vf code, const float *scales, const float *leasts, int number)
{
    vf product = code * vload(scales + number % PERIOD);
    return leasts ? product + vload(leasts + number % PERIOD) : product;
}

/* Widen n codes, a multiple of 128, whose scales and leasts are repeated after PERIOD. */
static inline __attribute__((always_inline)) void widen_codes(const char *codes, const int bits, int n,
                                                              const float *scales, const float *leasts, elem *to)
{
    for (; n > 0; n -= RUN, codes += RUN * bits / 8, to += RUN) {
        vu words[16 / LANES];
        if (bits == 4)
            memcpy(words, codes, sizeof words);
#pragma GCC unroll 32
        for (int vector = 0; vector < RUN / LANES; vector += 2) {
            vf two[2];
            for (int i = 0; i < 2; i++) {
                int number = (vector + i) * LANES;
                vf code = bits == 4 ? floats_of_run(words, vector + i) : vload_bytes((const int8_t *)codes + number);
                two[i] = scaled(code, scales, leasts, number);
            }
            store_neighbours(to + vector * LANES, two[0], two[1]);
        }
    }
}

static inline __attribute__((always_inline)) void widen_block(const Grouping *groups, const int bits,
                                                              const bool has_leasts, const char *block, elem *to)
{
    _Alignas(64) float scales[PERIOD], leasts[PERIOD];
    int count = groups->inputs == 16 ? 2 : 1; /* A division would delay each block. */
    int size = PANEL * groups->scale_bytes, numbers = PANEL * groups->inputs;
    const char *codes = block + count * size * (1 + has_leasts);
    for (const char *line = block; line < codes + 128 * bits; line += 64)
        __builtin_prefetch(line + AHEAD);
    for (int group = 0; group < count; group++, codes += numbers * bits / 8, to += numbers) {
        spread(block + group * size, groups->scale_bytes, scales);
        if (has_leasts)
            spread(block + (count + group) * size, groups->scale_bytes, leasts);
        else if (bits == 4) /* Without least values, codes of 4 bits are 8 too large. */
            for (int i = 0; i < PERIOD; i += LANES)
                vstore(leasts + i, vload(scales + i) * -8.0f);
        widen_codes(codes, bits, numbers, scales, has_leasts || bits == 4 ? leasts : NULL, to);
    }
}

static void widen_4(const Grouping *groups, const char *block, elem *to)
{
    widen_block(groups, 4, false, block, to);
}

static void widen_4_with_leasts(const Grouping *groups, const char *block, elem *to)
{
    widen_block(groups, 4, true, block, to);
}

static void widen_8(const Grouping *groups, const char *block, elem *to)
{
    widen_block(groups, 8, false, block, to);
}

static void widen_8_with_leasts(const Grouping *groups, const char *block, elem *to)
{
    widen_block(groups, 8, true, block, to);
}

WidenBlock *NAME(widener)(const Grouping *groups)
{
    if (groups->bits == 4)
        return groups->has_leasts ? widen_4_with_leasts : widen_4;
    return groups->has_leasts ? widen_8_with_leasts : widen_8;
}

void NAME(widen_blocks)(const Grouping *groups, const char *blocks, int inputs, elem *to)
{
    WidenBlock *widen = NAME(widener)(groups);
    int size = block_bytes(groups);
    for (int i = 0; i < inputs; i += 32, blocks += size, to += 32 * PANEL)
        widen(groups, blocks, to);
}

void NAME(panel_multiply_blocks)(const elem *a, ptrdiff_t lda, int rows, const char *panel, const Grouping *groups,
                                 int inputs, float *c, ptrdiff_t ldc)
{
#ifdef HAS_TILES
    if (rows <= BLOCK_ROWS) {
        NAME(panel_multiply_few_blocks)(a, lda, rows, panel, groups, inputs, c, ldc);
        return;
    }
#endif
    _Alignas(64) elem slice[SLICE * PANEL];
    for (int first = 0; first < inputs; first += SLICE, panel += SLICE / 32 * block_bytes(groups)) {
        int count = inputs - first < SLICE ? inputs - first : SLICE;
        NAME(widen_blocks)(groups, panel, count, slice);
        NAME(panel_multiply)(a + first, lda, rows, slice, count, c, ldc, first > 0);
    }
}

/* The place in a block of the code of input i of output r: its number in the order of `elem`. */
static inline int number_of(int i, int r) { return (i / PAIR * PANEL + r) * PAIR + i % PAIR; }

/* Byte and lowest bit of a code of 4 bits. */
static inline int byte_of(int number) { return number / RUN * (RUN / 2) + number % 16 * 4 + number % RUN / 32; }
static inline int bit_of(int number) { return 4 * (number / 16 % 2); }

/* Read a scale or least value of a group of one output. */
static inline float scale_at(const Grouping *groups, const char *of_block, int group, int r)
{
    const char *at = of_block + (group * PANEL + r) * groups->scale_bytes;
    if (groups->scale_bytes == 4)
        return *(const float *)at;
    float many[LANES];
    uint16_t halves[LANES] = {*(const uint16_t *)at};
    vstore(many, vload_half(halves));
    return many[0];
}

void NAME(widen_output)(const Linear *linear, int output, float factor, float *to)
{
    const Grouping *groups = &linear->groups;
    int r = output % PANEL, step = block_bytes(groups), scales = step - 128 * groups->bits;
    const char *block = (const char *)linear->packed + (size_t)(output / PANEL) * (linear->inputs / 32) * step;
    for (int first = 0; first < linear->inputs; first += 32, block += step) {
        const uint8_t *codes = (const uint8_t *)block + scales;
        float scale = 0, least = 0;
        for (int i = 0; i < 32; i++) {
            int group = i / groups->inputs, number = number_of(i, r);
            if (i % groups->inputs == 0) {
                scale = scale_at(groups, block, group, r);
                least = groups->has_leasts ? scale_at(groups, block + scales / 2, group, r) : 0;
            }
            int code = groups->bits == 8 ? (int8_t)codes[number] : (codes[byte_of(number)] >> bit_of(number)) & 15;
            if (groups->bits == 4 && !groups->has_leasts)
                code -= 8;
            float rounded = float_of(elem_of((float)code * scale + least));
            to[first + i] = float_of(elem_of(rounded * factor));
        }
    }
}

/* Put output r of a panel, with codes[inputs] and the scales and leasts of its groups, into its blocks. */
static void pack_output(const Grouping *groups, int r, int inputs, const int8_t *codes, const char *scales,
                        const char *leasts, char *panel)
{
    int count = 32 / groups->inputs, scale_bytes = groups->scale_bytes, offset = groups->has_leasts ? 0 : 8;
    for (int first = 0; first < inputs; first += 32, panel += block_bytes(groups)) {
        char *at = panel + r * scale_bytes;
        for (int group = 0; group < count; group++, at += PANEL * scale_bytes) {
            memcpy(at, scales + (first / 32 * count + group) * scale_bytes, scale_bytes);
            if (groups->has_leasts)
                memcpy(at + count * PANEL * scale_bytes, leasts + (first / 32 * count + group) * scale_bytes,
                       scale_bytes);
        }
        uint8_t *to = (uint8_t *)panel + count * PANEL * scale_bytes * (1 + groups->has_leasts);
        for (int i = 0; i < 32; i++) {
            int number = number_of(i, r);
            if (groups->bits == 8)
                to[number] = (uint8_t)codes[first + i];
            else
                to[byte_of(number)] |= ((codes[first + i] + offset) & 15) << bit_of(number);
        }
    }
}

/* Pack codes [outputs][inputs], 0 to 15 or, without leasts, -8 to 7 if they have 4 bits. Scales and leasts, of the type
 * that `groups` says, are [outputs][inputs / group]. Inputs: a multiple of 32; is_swiglu as in raydix_pack. */
EXPORT void NAME(raydix_pack_blocks)(const int8_t *codes, const char *scales, const char *leasts,
                                     const Grouping *groups, int outputs, int inputs, bool is_swiglu, char *packed)
{
    size_t size = (size_t)inputs / 32 * block_bytes(groups), row = (size_t)inputs / groups->inputs * groups->scale_bytes;
    int panels = round_up(outputs, PANEL) / PANEL, width = is_swiglu ? PANEL / 2 : PANEL;
#pragma omp parallel for
    for (int p = 0; p < panels; p++) {
        memset(packed + p * size, 0, size);
        for (int r = 0; r < PANEL; r++) {
            int output = r < width ? p * width + r : outputs / 2 + p * width + r - width;
            if (output < outputs)
                pack_output(groups, r, inputs, codes + (size_t)output * inputs, scales + output * row,
                            leasts + (groups->has_leasts ? output * row : 0), packed + p * size);
        }
    }
}

#undef SLICE
#undef PERIOD
#undef RUN
#undef AHEAD
