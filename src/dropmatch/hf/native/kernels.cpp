// Products of a few rows with a weight matrix in memory, for x86 CPUs with AVX-512 or AVX2. Compiled by library.py,
// called through ctypes. Nothing here allocates per call but scratch space that a thread keeps.
//
// linear_bf16: weights stay bfloat16 and row-major, as the model holds them; they are widened in registers and summed
// in float32 by ordinary multiply-adds, which have twice the rate of AVX-512's bfloat16 dot product. The order of
// summation does not depend on how many rows are multiplied together, so a row's result does not either.
//
// linear_int4: 4-bit weights times 8-bit inputs, summed exactly in groups of 32 inputs.
//
// rms_norm, rotate, silu_product: what stands between the products, each in one pass, rounded to bfloat16 wherever
// transformers' operations round.

#ifdef __AVX512F__
#include "avx512.h"
#else
#include "avx2.h"
#endif

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

namespace {

constexpr int64_t BLOCK = 32;         // output features per unit of work
constexpr int64_t DEPTH = 512;       // inputs per pass: a tile's rows fit the first-level cache
constexpr int64_t GROUP = 32;        // inputs that share an int4 scale
constexpr int64_t MOST_WIDENED = 480;  // rows widened at once, a multiple of MOST_ROWS: a thread keeps that space
constexpr int64_t PACKED = 16;       // output features that pack_int4 puts side by side

inline Floats rounded(Floats x) { return widen(narrow(x)); }

// Sums of R weight rows with M input rows over `depth` inputs, added to sums[r * M + m].
// x: [depth / LANES][M][LANES], so that one pointer reaches all rows.
template <int M, int R>
inline void tile(const float* x, const bf16* w, int64_t ldw, int64_t depth, Floats* sums) {
    Floats acc[R][M];
    for (int r = 0; r < R; r++)
        for (int m = 0; m < M; m++) acc[r][m] = sums[r * M + m];
    for (int64_t k = 0; k < depth; k += LANES, x += M * LANES) {
        Floats row[R];
        for (int r = 0; r < R; r++) {
            if (LANES == 16 || k % 32 == 0)  // once or twice a cache line
                _mm_prefetch(reinterpret_cast<const char*>(w + (r + R) * ldw + k), _MM_HINT_T0);
            row[r] = load_bf16(w + r * ldw + k);
        }
        for (int m = 0; m < M; m++) {
            Floats input = load(x + m * LANES);
            stay_in_register(input);  // one load for all R products: loads, not sums, would set the pace
            for (int r = 0; r < R; r++) acc[r][m] = multiply_add(input, row[r], acc[r][m]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int m = 0; m < M; m++) sums[r * M + m] = acc[r][m];
}

// M input rows with `count` weight rows. x: [inputs / LANES][M][LANES]; sums: room for count * M.
template <int M>
void multiply_rows(const float* x, const bf16* w, const bf16* bias, const bf16* added, bf16* out, int64_t ldw,
                   int64_t ldout, int64_t inputs, int64_t count, Floats* sums) {
    constexpr int R = weight_rows(M);
    std::fill(sums, sums + count * M, zeros());
    for (int64_t k = 0; k < inputs; k += DEPTH, x += DEPTH * M) {
        const int64_t depth = std::min(DEPTH, inputs - k);
        int64_t n = 0;
        for (; n + R <= count; n += R) tile<M, R>(x, w + n * ldw + k, ldw, depth, sums + n * M);
        for (; n < count; n++) tile<M, 1>(x, w + n * ldw + k, ldw, depth, sums + n * M);
    }
    for (int64_t n = 0; n < count; n += LANES) {
        const int64_t here = std::min(LANES, count - n);
        const Floats shift = bias == nullptr ? zeros() : load_first_bf16(bias + n, here);
        for (int64_t m = 0; m < M; m++) {
            Floats column[LANES];
            for (int64_t i = 0; i < LANES; i++) column[i] = i < here ? sums[(n + i) * M + m] : zeros();
            Floats result = add(sum_lanes(column), shift);
            if (added != nullptr) result = add(rounded(result), load_first_bf16(added + m * ldout + n, here));
            store_first_bf16(out + m * ldout + n, here, result);
        }
    }
}

using Multiply = void (*)(const float*, const bf16*, const bf16*, const bf16*, bf16*, int64_t, int64_t, int64_t, int64_t,
                          Floats*);

template <int... M>
constexpr Multiply choose_from(int64_t rows, std::integer_sequence<int, M...>) {
    Multiply chosen = nullptr;
    ((chosen = rows == M + 1 ? multiply_rows<M + 1> : chosen), ...);
    return chosen;
}

// What multiplies so many rows: 1 to MOST_ROWS.
inline Multiply choose(int64_t rows) { return choose_from(rows, std::make_integer_sequence<int, MOST_ROWS>()); }

// e^x to about 1e-7, relative; 0 and infinity beyond float32's range. A NaN stays one.
inline Floats exponential(Floats x) {
    const Floats in_range = smaller(all(89), larger(all(-104), x));
    const Floats whole = to_whole(multiply(in_range, all(1.44269504f)));
    Floats rest = negative_multiply_add(whole, all(0.693359375f), in_range);
    rest = negative_multiply_add(whole, all(-2.12194440e-4f), rest);
    Floats sum = all(1.0f / 5040);
    for (const float coefficient : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
        sum = multiply_add(sum, rest, all(coefficient));
    return unless_not_number(x, times_power_of_two(sum, whole));
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

// M input rows with LANES output features of a block of PACKED, from `first` on.
template <int M>
void int4_block(const uint8_t* block, const int8_t* codes, const float* scales, const float* totals, int64_t groups,
                int64_t width, int64_t first, Floats* out) {
    const int64_t lane = LANES == PACKED ? 0 : first;
    Floats acc[M];
    for (int m = 0; m < M; m++) acc[m] = zeros();
    for (int64_t g = 0; g < groups; g++, block += 320) {
        Counts even[M], odd[M];
        for (int m = 0; m < M; m++) even[m] = odd[m] = no_counts();
        for (int j = 0; j < 4; j++) {
            _mm_prefetch(reinterpret_cast<const char*>(block + 64 * j + 2048), _MM_HINT_T0);
            const Bytes both = load_bytes(block + 64 * j + 4 * lane);
            const Bytes low = low_half(both), high = high_half(both);
            for (int m = 0; m < M; m++) {
                int32_t a, b;
                std::memcpy(&a, codes + m * width + g * GROUP + 8 * j, 4);
                std::memcpy(&b, codes + m * width + g * GROUP + 8 * j + 4, 4);
                even[m] = add_products(even[m], low, a);
                odd[m] = add_products(odd[m], high, b);
            }
        }
        _mm_prefetch(reinterpret_cast<const char*>(block + 256 + 2048), _MM_HINT_T0);
        const Floats scale = load_bf16(reinterpret_cast<const bf16*>(block + 256 + 2 * lane));
        const Floats middle = load_bf16(reinterpret_cast<const bf16*>(block + 288 + 2 * lane));
        const Floats offset = negative_multiply_add(scale, all(8), middle);  // the value of code 0
        for (int m = 0; m < M; m++) {
            const Floats product = to_floats(add_counts(even[m], odd[m]));
            acc[m] = multiply_add(multiply(product, all(scales[m * groups + g])), scale, acc[m]);
            acc[m] = multiply_add(offset, all(totals[m * groups + g]), acc[m]);
        }
    }
    for (int m = 0; m < M; m++) out[m] = acc[m];
}

using Int4Block = void (*)(const uint8_t*, const int8_t*, const float*, const float*, int64_t, int64_t, int64_t, Floats*);
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
                store(wide + m0 * inputs + k * together + m * LANES, load_bf16(x + (m0 + m) * inputs + k));
    }
    const int64_t blocks = (features + BLOCK - 1) / BLOCK;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t n = block * BLOCK, count = std::min(BLOCK, features - n);
        Floats* sums = scratch<Floats>(sums_store, BLOCK * MOST_ROWS);
        for (int64_t m = 0; m < rows; m += MOST_ROWS)
            choose(std::min(MOST_ROWS, rows - m))(wide + m * inputs, weight + n * ldw, bias == nullptr ? nullptr : bias + n,
                                                  added == nullptr ? nullptr : added + m * features + n,
                                                  out + m * features + n, ldw, features, inputs, count, sums);
    }
}

// packed [features / 16][inputs / 32][320] from codes [features, inputs] of 0 to 15 and, per row and group, bfloat16
// scales and values of code 8 [features, inputs / 32]. features: a multiple of 16; inputs: of 32.
void pack_int4(const uint8_t* codes, const bf16* scales, const bf16* middles, uint8_t* packed, int64_t features,
               int64_t inputs) {
    const int64_t groups = inputs / GROUP;
    for (int64_t n0 = 0; n0 < features; n0 += PACKED)
        for (int64_t g = 0; g < groups; g++, packed += 320) {
            for (int64_t n = 0; n < PACKED; n++) {
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
    constexpr int64_t PARTS = GROUP / LANES;
    for (int64_t i = 0; i < rows * groups; i++) {
        Floats group[PARTS];
        for (int64_t p = 0; p < PARTS; p++) group[p] = load_bf16(x + i * GROUP + p * LANES);
        bool is_number = true;  // a maximum may pass over a NaN
        for (int64_t p = 0; p < PARTS; p += 2) is_number &= are_numbers(group[p], group[p + 1]);
        Floats most = magnitude(group[0]);
        for (int64_t p = 1; p < PARTS; p++) most = larger(most, magnitude(group[p]));
        const float largest = is_number ? largest_lane(most) : NAN;
        const Floats inverse = all(largest > 0 ? 127 / largest : 0);
        Counts total = no_counts();
        for (int64_t p = 0; p < PARTS; p++) {
            const Counts code = to_counts(multiply(group[p], inverse));
            store_as_bytes(codes + i * GROUP + p * LANES, code);
            total = add_counts(total, code);
        }
        scales[i] = largest / 127;
        totals[i] = scales[i] * static_cast<float>(sum_counts(total));
    }
    const Int4Block run = INT4_BLOCK[rows];
    const int64_t blocks = features / PACKED, size = groups * 320;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t block = 0; block < blocks; block++)
        for (int64_t first = 0; first < PACKED; first += LANES) {
            Floats sums[MOST_INT4_ROWS];
            run(packed + block * size, codes, scales, totals, groups, inputs, first, sums);
            const int64_t feature = block * PACKED + first;
            const Floats shift = bias == nullptr ? zeros() : load_bf16(bias + feature);
            for (int64_t m = 0; m < rows; m++) {
                const int64_t place = m * features + feature;
                Floats result = add(sums[m], shift);
                if (added != nullptr) result = add(rounded(result), load_bf16(added + place));
                store_bf16(out + place, result);
            }
        }
}

// out = weight * x / sqrt(mean(x^2) + epsilon) by row. width: a multiple of 16.
void rms_norm(const bf16* x, const bf16* weight, float epsilon, bf16* out, int64_t rows, int64_t width) {
    for (int64_t m = 0; m < rows; m++, x += width, out += width) {
        Floats squares = zeros();
        for (int64_t k = 0; k < width; k += LANES) {
            const Floats here = load_bf16(x + k);
            squares = multiply_add(here, here, squares);
        }
        const float mean = sum(squares) / static_cast<float>(width);
        const Floats scale = all(1 / std::sqrt(mean + epsilon));
        for (int64_t k = 0; k < width; k += LANES)
            store_bf16(out + k, multiply(load_bf16(weight + k), rounded(multiply(load_bf16(x + k), scale))));
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
                const Floats a = load_bf16(low), b = load_bf16(high);
                const Floats minus_b = subtract(zeros(), b);
                store_bf16(low, add(rounded(multiply(a, load_bf16(cosines + k))),
                                              rounded(multiply(minus_b, load_bf16(sines + k)))));
                store_bf16(high, add(rounded(multiply(b, load_bf16(cosines + half + k))),
                                               rounded(multiply(a, load_bf16(sines + half + k)))));
            }
}

// out[rows, width] = silu(both[:, :width]) * both[:, width:]. width: a multiple of 16.
void silu_product(const bf16* both, bf16* out, int64_t rows, int64_t width) {
    for (int64_t m = 0; m < rows; m++, both += 2 * width, out += width)
        for (int64_t k = 0; k < width; k += LANES) {
            const Floats gate = load_bf16(both + k);
            const Floats divisor = add(all(1), exponential(subtract(zeros(), gate)));
            store_bf16(out + k, multiply(rounded(divide(gate, divisor)), load_bf16(both + width + k)));
        }
}
}
