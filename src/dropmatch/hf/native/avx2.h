// Vectors of 8 numbers, for CPUs with AVX2 and FMA. The same names as in avx512.h.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

using bf16 = uint16_t;
using Floats = __m256;
using Bytes = __m256i;   // 4 bytes of each lane
using Counts = __m256i;  // 32 bits of each lane

constexpr int64_t LANES = 8;
constexpr int64_t MOST_ROWS = 6;  // input rows in one tile: 2 x 6 sums, 2 weights and an input fit the 16 registers
constexpr int weight_rows(int input_rows) { return input_rows <= 2 ? 4 : 2; }  // of such a tile

inline Floats zeros() { return _mm256_setzero_ps(); }
inline Floats all(float x) { return _mm256_set1_ps(x); }
inline Floats load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Floats x) { _mm256_storeu_ps(p, x); }
inline void stay_in_register(Floats& x) { asm("" : "+x"(x)); }

inline Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline Floats subtract(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
inline Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats divide(Floats a, Floats b) { return _mm256_div_ps(a, b); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }           // a b + c
inline Floats negative_multiply_add(Floats a, Floats b, Floats c) { return _mm256_fnmadd_ps(a, b, c); }  // c - a b
inline Floats smaller(Floats a, Floats b) { return _mm256_min_ps(a, b); }  // b where one is not a number
inline Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }   // b where one is not a number
inline Floats magnitude(Floats x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
inline Floats to_whole(Floats x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

inline Floats power_of_two(__m256i exponent) {  // -126 to 127
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(exponent, _mm256_set1_epi32(127)), 23));
}

inline Floats times_power_of_two(Floats x, Floats whole) {  // whole: -252 to 254, in two steps that do not overflow
    const __m256i exponent = _mm256_cvtps_epi32(whole), half = _mm256_srai_epi32(exponent, 1);
    return multiply(multiply(x, power_of_two(half)), power_of_two(_mm256_sub_epi32(exponent, half)));
}

inline float sum(Floats x) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

inline float largest_lane(Floats x) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

inline __m256 not_numbers(Floats x) { return _mm256_cmp_ps(x, x, _CMP_UNORD_Q); }
inline bool are_numbers(Floats a, Floats b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_UNORD_Q)) == 0; }
inline Floats unless_not_number(Floats x, Floats result) { return _mm256_blendv_ps(result, x, not_numbers(x)); }

inline Floats widen(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }

inline __m128i narrow(Floats x) {  // to the nearest, ties to even; a NaN stays one
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), _mm256_castps_si256(not_numbers(x)));
    rounded = _mm256_srli_epi32(rounded, 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
}

inline Floats load_bf16(const bf16* p) { return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline void store_bf16(bf16* p, Floats x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow(x)); }

inline Floats load_first_bf16(const bf16* p, int64_t count) {  // 0 in the other lanes
    if (count == LANES) return load_bf16(p);
    bf16 room[LANES] = {};
    std::memcpy(room, p, count * sizeof(bf16));
    return load_bf16(room);
}

inline void store_first_bf16(bf16* p, int64_t count, Floats x) {
    if (count == LANES) return store_bf16(p, x);
    bf16 room[LANES];
    store_bf16(room, x);
    std::memcpy(p, room, count * sizeof(bf16));
}

// The sums over the lanes of 8 vectors, one in each lane of the result.
inline Floats sum_lanes(const Floats* v) {
    const __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
    const __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(v[4], v[5]), _mm256_hadd_ps(v[6], v[7]));
    return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}

inline Counts no_counts() { return _mm256_setzero_si256(); }
inline Counts add_counts(Counts a, Counts b) { return _mm256_add_epi32(a, b); }
inline Floats to_floats(Counts x) { return _mm256_cvtepi32_ps(x); }
inline int32_t sum_counts(Counts x) {
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
inline Counts to_counts(Floats x) { return _mm256_cvtps_epi32(x); }
inline void store_as_bytes(int8_t* p, Counts x) {
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}

inline Bytes load_bytes(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline Bytes low_half(Bytes x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
inline Bytes high_half(Bytes x) { return _mm256_and_si256(_mm256_srli_epi16(x, 4), _mm256_set1_epi8(15)); }

// sums + each lane's 4 unsigned bytes (at most 15) times the 4 signed ones of `codes`. 2 x 15 x 128 fits 16 bits.
inline Counts add_products(Counts sums, Bytes bytes, int32_t codes) {
    const __m256i pairs = _mm256_maddubs_epi16(bytes, _mm256_set1_epi32(codes));
    return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

}  // namespace
