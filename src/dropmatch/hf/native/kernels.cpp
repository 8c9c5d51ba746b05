// Products of a few rows with a weight matrix in memory, for x86 CPUs with AVX-512. Compiled by library.py, called
// through ctypes. Nothing here allocates per call but scratch space that a thread keeps.
//
// linear_bf16: weights stay bfloat16 and row-major, as the model holds them; they are widened in registers and summed
// in float32 by ordinary multiply-adds, which have twice the rate of AVX-512's bfloat16 dot product. The order of
// summation does not depend on how many rows are multiplied together, so a row's result does not either.
//
// linear_int4: 4-bit weights times 8-bit inputs by VNNI, in groups of 32 inputs.
//
// rms_norm, rotate, silu_product: what stands between the products, each in one pass, rounded to bfloat16 wherever
// transformers' operations round.

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

using bf16 = uint16_t;

constexpr int64_t LANES = 16;
constexpr int64_t MOST_ROWS = 12;    // rows in one tile: 2 x 12 sums fill the registers
constexpr int64_t BLOCK = 32;         // output features per unit of work
constexpr int64_t DEPTH = 512;       // inputs per pass: a tile's rows fit the first-level cache
constexpr int64_t GROUP = 32;        // inputs that share an int4 scale
constexpr int64_t MOST_WIDENED = 40 * MOST_ROWS;  // rows widened at once: a thread keeps that space

inline __m512 widen(__m256i x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

inline __m512 load_bf16(const bf16* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }

inline __m256i narrow(__m512 x) {  // to the nearest, ties to even; a NaN stays one
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    rounded = _mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(0x7fc00000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}

inline void store_bf16(bf16* p, __m512 x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(x)); }

inline __m512 rounded(__m512 x) { return widen(narrow(x)); }

inline __mmask16 first_lanes(int64_t count) { return static_cast<__mmask16>((1u << count) - 1u); }

// The sums over the lanes of 16 vectors, one in each lane of the result.
inline __m512 sum_lanes(const __m512* v) {
    __m512 quads[4];
    for (int q = 0; q < 4; q++) {
        const __m512 a = v[4 * q], b = v[4 * q + 1], c = v[4 * q + 2], d = v[4 * q + 3];
        const __m512d ab = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
        const __m512d cd = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
        quads[q] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
    }
    __m512 halves[2];
    for (int h = 0; h < 2; h++) {
        const __m512 a = quads[2 * h], b = quads[2 * h + 1];
        halves[h] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    }
    return _mm512_add_ps(_mm512_shuffle_f32x4(halves[0], halves[1], 0x88), _mm512_shuffle_f32x4(halves[0], halves[1], 0xdd));
}

// Sums of R weight rows with M input rows over `depth` inputs, added to sums[r * M + m].
// x: [depth / 16][M][16], so that one pointer reaches all rows.
template <int M, int R>
inline void tile(const float* x, const bf16* w, int64_t ldw, int64_t depth, __m512* sums) {
    __m512 acc[R][M];
    for (int r = 0; r < R; r++)
        for (int m = 0; m < M; m++) acc[r][m] = sums[r * M + m];
    for (int64_t k = 0; k < depth; k += LANES, x += M * LANES) {
        __m512 row[R];
        for (int r = 0; r < R; r++) {
            _mm_prefetch(reinterpret_cast<const char*>(w + (r + R) * ldw + k), _MM_HINT_T0);
            row[r] = load_bf16(w + r * ldw + k);
        }
        for (int m = 0; m < M; m++) {
            __m512 input = _mm512_loadu_ps(x + m * LANES);
            asm("" : "+v"(input));  // one load for all R products: loads, not sums, would set the pace
            for (int r = 0; r < R; r++) acc[r][m] = _mm512_fmadd_ps(input, row[r], acc[r][m]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int m = 0; m < M; m++) sums[r * M + m] = acc[r][m];
}

// M input rows with `count` weight rows. x: [inputs / 16][M][16]; sums: room for count * M.
template <int M>
void multiply(const float* x, const bf16* w, const bf16* bias, const bf16* added, bf16* out, int64_t ldw, int64_t ldout,
              int64_t inputs, int64_t count, __m512* sums) {
    constexpr int R = M <= 6 ? 4 : 2;
    std::fill(sums, sums + count * M, _mm512_setzero_ps());
    for (int64_t k = 0; k < inputs; k += DEPTH, x += DEPTH * M) {
        const int64_t depth = std::min(DEPTH, inputs - k);
        int64_t n = 0;
        for (; n + R <= count; n += R) tile<M, R>(x, w + n * ldw + k, ldw, depth, sums + n * M);
        for (; n < count; n++) tile<M, 1>(x, w + n * ldw + k, ldw, depth, sums + n * M);
    }
    for (int64_t n = 0; n < count; n += LANES) {
        const int64_t here = std::min(LANES, count - n);
        const __mmask16 lanes = first_lanes(here);
        const __m512 shift = bias == nullptr ? _mm512_setzero_ps() : widen(_mm256_maskz_loadu_epi16(lanes, bias + n));
        for (int64_t m = 0; m < M; m++) {
            __m512 column[LANES];
            for (int64_t i = 0; i < LANES; i++) column[i] = i < here ? sums[(n + i) * M + m] : _mm512_setzero_ps();
            __m512 result = _mm512_add_ps(sum_lanes(column), shift);
            if (added != nullptr)
                result = _mm512_add_ps(rounded(result), widen(_mm256_maskz_loadu_epi16(lanes, added + m * ldout + n)));
            _mm256_mask_storeu_epi16(out + m * ldout + n, lanes, narrow(result));
        }
    }
}

using Multiply = void (*)(const float*, const bf16*, const bf16*, const bf16*, bf16*, int64_t, int64_t, int64_t, int64_t,
                          __m512*);
const Multiply MULTIPLY[MOST_ROWS + 1] = {
    nullptr,     multiply<1>, multiply<2>, multiply<3>,  multiply<4>,  multiply<5>,  multiply<6>,
    multiply<7>, multiply<8>, multiply<9>, multiply<10>, multiply<11>, multiply<12>,
};

// e^x to about 1e-7, relative; 0 and infinity beyond float32's range. A NaN stays one.
inline __m512 exponential(__m512 x) {
    const __m512 in_range = _mm512_min_ps(_mm512_set1_ps(89), _mm512_max_ps(_mm512_set1_ps(-104), x));
    const __m512 whole = _mm512_roundscale_ps(_mm512_mul_ps(in_range, _mm512_set1_ps(1.44269504f)), 0);
    __m512 rest = _mm512_fnmadd_ps(whole, _mm512_set1_ps(0.693359375f), in_range);
    rest = _mm512_fnmadd_ps(whole, _mm512_set1_ps(-2.12194440e-4f), rest);
    __m512 sum = _mm512_set1_ps(1.0f / 5040);
    for (const float coefficient : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
        sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(coefficient));
    const __m512 result = _mm512_scalef_ps(sum, whole);
    return _mm512_mask_mov_ps(result, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), x);
}

struct alignas(64) Line {
    char bytes[64];
};

// Scratch space of this thread, aligned for vectors.
template <typename T>
T* scratch(std::vector<Line>& store, int64_t count) {
    const size_t lines = (count * sizeof(T) + sizeof(Line) - 1) / sizeof(Line);
    if (store.size() < lines) store.resize(lines);
    return reinterpret_cast<T*>(store.data());
}

thread_local std::vector<Line> inputs_store, sums_store, codes_store;

template <int M>
void int4_block(const uint8_t* block, const int8_t* codes, const float* scales, const float* totals, int64_t groups,
                int64_t width, __m512* out) {
    const __m512i low = _mm512_set1_epi8(15);
    __m512 acc[M];
    for (int m = 0; m < M; m++) acc[m] = _mm512_setzero_ps();
    for (int64_t g = 0; g < groups; g++, block += 320) {
        __m512i even[M], odd[M];
        for (int m = 0; m < M; m++) even[m] = odd[m] = _mm512_setzero_si512();
        for (int j = 0; j < 4; j++) {
            _mm_prefetch(reinterpret_cast<const char*>(block + 64 * j + 2048), _MM_HINT_T0);
            const __m512i both = _mm512_loadu_si512(block + 64 * j);
            const __m512i first = _mm512_and_si512(both, low);
            const __m512i second = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
            for (int m = 0; m < M; m++) {
                int32_t a, b;
                std::memcpy(&a, codes + m * width + g * GROUP + 8 * j, 4);
                std::memcpy(&b, codes + m * width + g * GROUP + 8 * j + 4, 4);
                even[m] = _mm512_dpbusd_epi32(even[m], first, _mm512_set1_epi32(a));
                odd[m] = _mm512_dpbusd_epi32(odd[m], second, _mm512_set1_epi32(b));
            }
        }
        _mm_prefetch(reinterpret_cast<const char*>(block + 256 + 2048), _MM_HINT_T0);
        const __m512 scale = load_bf16(reinterpret_cast<const bf16*>(block + 256));
        const __m512 middle = load_bf16(reinterpret_cast<const bf16*>(block + 288));
        const __m512 offset = _mm512_fnmadd_ps(scale, _mm512_set1_ps(8), middle);  // the value of code 0
        for (int m = 0; m < M; m++) {
            const __m512 product = _mm512_cvtepi32_ps(_mm512_add_epi32(even[m], odd[m]));
            acc[m] = _mm512_fmadd_ps(_mm512_mul_ps(product, _mm512_set1_ps(scales[m * groups + g])), scale, acc[m]);
            acc[m] = _mm512_fmadd_ps(offset, _mm512_set1_ps(totals[m * groups + g]), acc[m]);
        }
    }
    for (int m = 0; m < M; m++) out[m] = acc[m];
}

using Int4Block = void (*)(const uint8_t*, const int8_t*, const float*, const float*, int64_t, int64_t, __m512*);
constexpr int64_t MOST_INT4_ROWS = 8;
const Int4Block INT4_BLOCK[MOST_INT4_ROWS + 1] = {
    nullptr,       int4_block<1>, int4_block<2>, int4_block<3>, int4_block<4>,
    int4_block<5>, int4_block<6>, int4_block<7>, int4_block<8>,
};

}  // namespace

extern "C" {

// Of the calling thread alone.
void set_num_threads(int count) { omp_set_num_threads(count); }

// out[rows, features] = x[rows, inputs] weight[features, inputs]^T + bias, all bfloat16 and contiguous but for the
// distance `ldw` between weight rows. inputs: a multiple of 16. bias may be null, and so may added[rows, features], which
// is added to the rounded product.
void linear_bf16(const bf16* x, const bf16* weight, const bf16* bias, const bf16* added, bf16* out, int64_t rows,
                 int64_t features, int64_t inputs, int64_t ldw, int threads) {
    for (; rows > MOST_WIDENED; rows -= MOST_WIDENED) {
        linear_bf16(x, weight, bias, added, out, MOST_WIDENED, features, inputs, ldw, threads);
        x += MOST_WIDENED * inputs;
        out += MOST_WIDENED * features;
        if (added != nullptr) added += MOST_WIDENED * features;
    }
    float* wide = scratch<float>(inputs_store, rows * inputs);
    for (int64_t m0 = 0; m0 < rows; m0 += MOST_ROWS) {
        const int64_t together = std::min(MOST_ROWS, rows - m0);
        for (int64_t m = 0; m < together; m++)
            for (int64_t k = 0; k < inputs; k += LANES)
                _mm512_storeu_ps(wide + m0 * inputs + k * together + m * LANES, load_bf16(x + (m0 + m) * inputs + k));
    }
    const int64_t blocks = (features + BLOCK - 1) / BLOCK;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t n = block * BLOCK, count = std::min(BLOCK, features - n);
        __m512* sums = scratch<__m512>(sums_store, BLOCK * MOST_ROWS);
        for (int64_t m = 0; m < rows; m += MOST_ROWS)
            MULTIPLY[std::min(MOST_ROWS, rows - m)](wide + m * inputs, weight + n * ldw,
                                                    bias == nullptr ? nullptr : bias + n,
                                                    added == nullptr ? nullptr : added + m * features + n,
                                                    out + m * features + n, ldw, features, inputs, count, sums);
    }
}

// packed [features / 16][inputs / 32][320] from codes [features, inputs] of 0 to 15 and, per row and group, bfloat16
// scales and values of code 8 [features, inputs / 32]. features: a multiple of 16; inputs: of 32.
void pack_int4(const uint8_t* codes, const bf16* scales, const bf16* middles, uint8_t* packed, int64_t features,
               int64_t inputs) {
    const int64_t groups = inputs / GROUP;
    for (int64_t n0 = 0; n0 < features; n0 += LANES)
        for (int64_t g = 0; g < groups; g++, packed += 320) {
            for (int64_t n = 0; n < LANES; n++) {
                const uint8_t* row = codes + (n0 + n) * inputs + g * GROUP;
                for (int j = 0; j < 4; j++)
                    for (int t = 0; t < 4; t++)
                        packed[64 * j + 4 * n + t] = row[8 * j + t] | static_cast<uint8_t>(row[8 * j + 4 + t] << 4);
                std::memcpy(packed + 256 + 2 * n, scales + (n0 + n) * groups + g, 2);
                std::memcpy(packed + 288 + 2 * n, middles + (n0 + n) * groups + g, 2);
            }
        }
}

// out[rows, features] = x[rows, inputs] W^T + bias, W as packed by pack_int4, at most 8 rows. Inputs are rounded to 8
// bits per row and group of 32; one that is not a number makes its row so. added: as for linear_bf16.
void linear_int4(const bf16* x, const uint8_t* packed, const bf16* bias, const bf16* added, bf16* out, int64_t rows,
                 int64_t features, int64_t inputs, int threads) {
    const int64_t groups = inputs / GROUP;
    int8_t* codes = scratch<int8_t>(codes_store, rows * inputs);
    float* scales = scratch<float>(inputs_store, 2 * rows * groups);
    float* totals = scales + rows * groups;
    for (int64_t i = 0; i < rows * groups; i++) {
        const __m512 a = load_bf16(x + i * GROUP), b = load_bf16(x + i * GROUP + LANES);
        const bool is_number = _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q) == 0;  // a maximum may pass over a NaN
        const float largest =
            is_number ? _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b))) : NAN;
        const __m512 inverse = _mm512_set1_ps(largest > 0 ? 127 / largest : 0);
        const __m512i p = _mm512_cvtps_epi32(_mm512_mul_ps(a, inverse)), q = _mm512_cvtps_epi32(_mm512_mul_ps(b, inverse));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i * GROUP), _mm512_cvtsepi32_epi8(p));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i * GROUP + LANES), _mm512_cvtsepi32_epi8(q));
        scales[i] = largest / 127;
        totals[i] = scales[i] * static_cast<float>(_mm512_reduce_add_epi32(_mm512_add_epi32(p, q)));
    }
    const Int4Block run = INT4_BLOCK[rows];
    const int64_t blocks = features / LANES, size = groups * 320;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t block = 0; block < blocks; block++) {
        __m512 sums[MOST_INT4_ROWS];
        run(packed + block * size, codes, scales, totals, groups, inputs, sums);
        const __m512 shift = bias == nullptr ? _mm512_setzero_ps() : load_bf16(bias + block * LANES);
        for (int64_t m = 0; m < rows; m++) {
            const int64_t place = m * features + block * LANES;
            __m512 result = _mm512_add_ps(sums[m], shift);
            if (added != nullptr) result = _mm512_add_ps(rounded(result), load_bf16(added + place));
            store_bf16(out + place, result);
        }
    }
}

// out = weight * x / sqrt(mean(x^2) + epsilon) by row. width: a multiple of 16.
void rms_norm(const bf16* x, const bf16* weight, float epsilon, bf16* out, int64_t rows, int64_t width) {
    for (int64_t m = 0; m < rows; m++, x += width, out += width) {
        __m512 squares = _mm512_setzero_ps();
        for (int64_t k = 0; k < width; k += LANES) {
            const __m512 here = load_bf16(x + k);
            squares = _mm512_fmadd_ps(here, here, squares);
        }
        const float mean = _mm512_reduce_add_ps(squares) / static_cast<float>(width);
        const __m512 scale = _mm512_set1_ps(1 / std::sqrt(mean + epsilon));
        for (int64_t k = 0; k < width; k += LANES)
            store_bf16(out + k, _mm512_mul_ps(load_bf16(weight + k), rounded(_mm512_mul_ps(load_bf16(x + k), scale))));
    }
}

// Rotary positions, in place: the first `heads` heads of each row of x[rows, stride], by cos and sin[rows, size].
// size: of a head, a multiple of 32.
void rotate(bf16* x, const bf16* cosines, const bf16* sines, int64_t rows, int64_t heads, int64_t size, int64_t stride) {
    const int64_t half = size / 2;
    for (int64_t m = 0; m < rows; m++, x += stride, cosines += size, sines += size)
        for (int64_t h = 0; h < heads; h++)
            for (int64_t k = 0; k < half; k += LANES) {
                bf16* low = x + h * size + k;
                bf16* high = low + half;
                const __m512 a = load_bf16(low), b = load_bf16(high);
                const __m512 minus_b = _mm512_sub_ps(_mm512_setzero_ps(), b);
                store_bf16(low, _mm512_add_ps(rounded(_mm512_mul_ps(a, load_bf16(cosines + k))),
                                              rounded(_mm512_mul_ps(minus_b, load_bf16(sines + k)))));
                store_bf16(high, _mm512_add_ps(rounded(_mm512_mul_ps(b, load_bf16(cosines + half + k))),
                                               rounded(_mm512_mul_ps(a, load_bf16(sines + half + k)))));
            }
}

// out[rows, width] = silu(both[:, :width]) * both[:, width:]. width: a multiple of 16.
void silu_product(const bf16* both, bf16* out, int64_t rows, int64_t width) {
    for (int64_t m = 0; m < rows; m++, both += 2 * width, out += width)
        for (int64_t k = 0; k < width; k += LANES) {
            const __m512 gate = load_bf16(both + k);
            const __m512 divisor = _mm512_add_ps(_mm512_set1_ps(1), exponential(_mm512_sub_ps(_mm512_setzero_ps(), gate)));
            store_bf16(out + k, _mm512_mul_ps(rounded(_mm512_div_ps(gate, divisor)), load_bf16(both + width + k)));
        }
}
}
