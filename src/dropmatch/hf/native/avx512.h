// Vectors of 16 numbers, for CPUs with AVX-512 and VNNI. The same names as in avx2.h.

#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {

using bf16 = uint16_t;
using Floats = __m512;
using Bytes = __m512i;    // 4 bytes of each lane
using Counts = __m512i;  // 32 bits of each lane

constexpr int64_t LANES = 16;
constexpr int64_t MOST_ROWS = 12;  // input rows in one tile: 2 x 12 sums fill the 32 registers
constexpr int weight_rows(int input_rows) { return input_rows <= 6 ? 4 : 2; }  // of such a tile

inline Floats zeros() { return _mm512_setzero_ps(); }
inline Floats all(float x) { return _mm512_set1_ps(x); }
inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Floats x) { _mm512_storeu_ps(p, x); }
inline void stay_in_register(Floats& x) { asm("" : "+v"(x)); }

inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats subtract(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats divide(Floats a, Floats b) { return _mm512_div_ps(a, b); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }           // a b + c
inline Floats negative_multiply_add(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a b
inline Floats smaller(Floats a, Floats b) { return _mm512_min_ps(a, b); }  // b where one is not a number
inline Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }   // b where one is not a number
inline Floats magnitude(Floats x) { return _mm512_abs_ps(x); }
inline Floats to_whole(Floats x) { return _mm512_roundscale_ps(x, 0); }
inline Floats times_power_of_two(Floats x, Floats whole) { return _mm512_scalef_ps(x, whole); }
inline float sum(Floats x) { return _mm512_reduce_add_ps(x); }
inline float largest_lane(Floats x) { return _mm512_reduce_max_ps(x); }

inline __mmask16 not_numbers(Floats x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }
inline bool are_numbers(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q) == 0; }
inline Floats unless_not_number(Floats x, Floats result) { return _mm512_mask_mov_ps(result, not_numbers(x), x); }

inline Floats widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }

inline __m256i narrow(Floats x) {  // to the nearest, ties to even; a NaN stays one
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    rounded = _mm512_mask_mov_epi32(rounded, not_numbers(x), _mm512_set1_epi32(0x7fc00000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}

inline __mmask16 first_lanes(int64_t count) { return static_cast<__mmask16>((1u << count) - 1u); }

inline Floats load_bf16(const bf16* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline void store_bf16(bf16* p, Floats x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(x)); }
inline Floats load_first_bf16(const bf16* p, int64_t count) {  // 0 in the other lanes
    return widen(_mm256_maskz_loadu_epi16(first_lanes(count), p));
}
inline void store_first_bf16(bf16* p, int64_t count, Floats x) {
    _mm256_mask_storeu_epi16(p, first_lanes(count), narrow(x));
}

// The sums over the lanes of 16 vectors, one in each lane of the result.
inline Floats sum_lanes(const Floats* v) {
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

inline Counts no_counts() { return _mm512_setzero_si512(); }
inline Counts add_counts(Counts a, Counts b) { return _mm512_add_epi32(a, b); }
inline Floats to_floats(Counts x) { return _mm512_cvtepi32_ps(x); }
inline int32_t sum_counts(Counts x) { return _mm512_reduce_add_epi32(x); }
inline Counts to_counts(Floats x) { return _mm512_cvtps_epi32(x); }
inline void store_as_bytes(int8_t* p, Counts x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(x));
}

inline Bytes load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline Bytes low_half(Bytes x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
inline Bytes high_half(Bytes x) { return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15)); }

// sums + each lane's 4 unsigned bytes (at most 15) times the 4 signed ones of `codes`.
inline Counts add_products(Counts sums, Bytes bytes, int32_t codes) {
    return _mm512_dpbusd_epi32(sums, bytes, _mm512_set1_epi32(codes));
}

}  // namespace
