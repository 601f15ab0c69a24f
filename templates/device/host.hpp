// The primitives of `cuda.cuh` for the host target; each is described there. Waiting, warp-wide work and asynchronous copies go
// to the scheduler (`host_runtime.cpp`); the rest is plain C++.
#pragma once
#include <cmath>
#include <cstring>

#include "host_runtime.hpp"

namespace kd {

struct bf16 { u16 bits; };
struct f16 { u16 bits; };
struct alignas(8) vec2 { u32 x, y; };
struct alignas(16) vec4 { u32 x, y, z, w; };

using saddr = u8*;
constexpr u32 all_lanes = 0xffffffffu;

#define KD_DEVICE static inline __attribute__((unused))
#define KD_KERNEL(threads, min_blocks) static void
#define KD_UNROLL
#define KD_NO_UNROLL
#ifndef __restrict__
#define __restrict__ __restrict
#endif

// ---------------------------------------------------------------------------------------------- where a thread is
KD_DEVICE u32 thread() { return self->thread; }
KD_DEVICE u32 lane() { return self->thread & 31; }
KD_DEVICE u32 warp() { return self->thread >> 5; }
KD_DEVICE u32 block_x() { return self->block[0]; }
KD_DEVICE u32 block_y() { return self->block[1]; }
KD_DEVICE u32 block_z() { return self->block[2]; }
KD_DEVICE u32 blocks_x() { return self->grid[0]; }
KD_DEVICE u32 blocks_y() { return self->grid[1]; }
KD_DEVICE u32 blocks_z() { return self->grid[2]; }

// ---------------------------------------------------------------------------------------------- shared memory
template <class T> KD_DEVICE T* shared(u32 offset) { return reinterpret_cast<T*>(self->shared + offset); }
KD_DEVICE saddr shared_at(u32 offset) { return self->shared + offset; }

// ---------------------------------------------------------------------------------------------- barriers
KD_DEVICE void block_sync(KD_SITE) { block_barrier(0, 0, true, site); }
KD_DEVICE void named_sync(u32 id, u32 threads, KD_SITE) { block_barrier(id, threads, true, site); }
KD_DEVICE void named_arrive(u32 id, u32 threads, KD_SITE) { block_barrier(id, threads, false, site); }
KD_DEVICE void warp_sync(u32 mask = all_lanes, KD_SITE) { warp_collective(Warp::sync, mask, nullptr, nullptr, nullptr, 0, site); }

// ---------------------------------------------------------------------------------------------- warp exchange
enum ShflKind : u32 { shfl_index, shfl_xored, shfl_upward, shfl_downward };
enum ReduceKind : u32 { reduce_kind_max, reduce_kind_min, reduce_kind_add, reduce_kind_or };

template <class T> struct ShflIn {
  T value;
  u32 operand;
};
template <class T> KD_DEVICE T shfl_any(T value, u32 operand, u32 mask, u32 kind, Site site) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 4 or 8 bytes");
  const ShflIn<T> in{value, operand};
  T out{};
  warp_collective(Warp::shfl, mask, &in, &out, sizeof(T) == 4 ? execute_shfl_4 : execute_shfl_8, kind, site);
  return out;
}
template <class T> KD_DEVICE T shfl(T value, u32 source, u32 mask = all_lanes, KD_SITE) { return shfl_any(value, source, mask, shfl_index, site); }
template <class T> KD_DEVICE T shfl_xor(T value, u32 bits, u32 mask = all_lanes, KD_SITE) { return shfl_any(value, bits, mask, shfl_xored, site); }
template <class T> KD_DEVICE T shfl_up(T value, u32 by, u32 mask = all_lanes, KD_SITE) { return shfl_any(value, by, mask, shfl_upward, site); }
template <class T> KD_DEVICE T shfl_down(T value, u32 by, u32 mask = all_lanes, KD_SITE) { return shfl_any(value, by, mask, shfl_downward, site); }
KD_DEVICE u32 ballot(bool vote, u32 mask = all_lanes, KD_SITE) {
  const u32 in = vote;
  u32 out = 0;
  warp_collective(Warp::ballot, mask, &in, &out, execute_ballot, 0, site);
  return out;
}
KD_DEVICE bool any(bool vote, u32 mask = all_lanes, KD_SITE) { return ballot(vote, mask, site) != 0; }
KD_DEVICE bool all(bool vote, u32 mask = all_lanes, KD_SITE) { return ballot(vote, mask, site) == mask; }
KD_DEVICE u32 reduce_any(u32 value, u32 mask, u32 kind, Site site) {
  u32 out = 0;
  warp_collective(Warp::reduce, mask, &value, &out, execute_reduce, kind, site);
  return out;
}
KD_DEVICE u32 reduce_max(u32 value, u32 mask = all_lanes, KD_SITE) { return reduce_any(value, mask, reduce_kind_max, site); }
KD_DEVICE u32 reduce_min(u32 value, u32 mask = all_lanes, KD_SITE) { return reduce_any(value, mask, reduce_kind_min, site); }
KD_DEVICE u32 reduce_add(u32 value, u32 mask = all_lanes, KD_SITE) { return reduce_any(value, mask, reduce_kind_add, site); }
KD_DEVICE u32 reduce_or(u32 value, u32 mask = all_lanes, KD_SITE) { return reduce_any(value, mask, reduce_kind_or, site); }

// ---------------------------------------------------------------------------------------------- matrix fragments
KD_DEVICE void check_aligned(const void* p, u32 bytes, const char* what, Site site) {
  if (reinterpret_cast<std::uintptr_t>(p) % bytes) fault(site, "%s address %p is not %u-byte aligned", what, p, bytes);
}
KD_DEVICE void ldmatrix_x4(u32 (&r)[4], saddr row, KD_SITE) {
  check_aligned(row, 16, "ldmatrix", site);
  warp_collective(Warp::ldmatrix, all_lanes, &row, r, execute_ldmatrix, 4, site);
}
KD_DEVICE void ldmatrix_x4_trans(u32 (&r)[4], saddr row, KD_SITE) {
  check_aligned(row, 16, "ldmatrix", site);
  warp_collective(Warp::ldmatrix_trans, all_lanes, &row, r, execute_ldmatrix_trans, 4, site);
}
KD_DEVICE void ldmatrix_x2(u32 (&r)[2], saddr row, KD_SITE) {
  if (lane() < 16) check_aligned(row, 16, "ldmatrix", site);
  warp_collective(Warp::ldmatrix, all_lanes, &row, r, execute_ldmatrix, 2, site);
}
KD_DEVICE void ldmatrix_x2_trans(u32 (&r)[2], saddr row, KD_SITE) {
  if (lane() < 16) check_aligned(row, 16, "ldmatrix", site);
  warp_collective(Warp::ldmatrix_trans, all_lanes, &row, r, execute_ldmatrix_trans, 2, site);
}
KD_DEVICE u32 movmatrix_trans(u32 value, KD_SITE) {
  u32 out = 0;
  warp_collective(Warp::movmatrix, all_lanes, &value, &out, execute_movmatrix, 0, site);
  return out;
}
struct MmaIn {
  const u32 *a, *b;
};
KD_DEVICE void mma_bf16(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2], KD_SITE) {
  const MmaIn in{a, b};
  warp_collective(Warp::mma, all_lanes, &in, c, execute_mma_bf16, 0, site);
}

// ---------------------------------------------------------------------------------------------- asynchronous copies by threads
KD_DEVICE void cp_async_16(saddr to, const void* from, u32 valid = 16, KD_SITE) {
  check_aligned(to, 16, "cp.async destination", site);
  if (valid) check_aligned(from, 16, "cp.async source", site);
  thread_copy(to, from, 16, valid, site);
}
KD_DEVICE void cp_async_4(saddr to, const void* from, u32 valid = 4, KD_SITE) {
  check_aligned(to, 4, "cp.async destination", site);
  if (valid) check_aligned(from, 4, "cp.async source", site);
  thread_copy(to, from, 4, valid, site);
}
KD_DEVICE void cp_async_commit() { thread_copy_commit(); }
template <u32 Pending> KD_DEVICE void cp_async_wait() { thread_copy_wait(Pending); }

// ---------------------------------------------------------------------------------------------- transaction barriers, bulk copies
KD_DEVICE void barrier_init(saddr barrier, u32 arrivals, KD_SITE) { transaction_init(barrier, arrivals, site); }
KD_DEVICE void barrier_init_fence() {}
KD_DEVICE void barrier_arrive(saddr barrier, KD_SITE) { transaction_arrive(barrier, 0, site); }
KD_DEVICE void barrier_expect(saddr barrier, u32 bytes, KD_SITE) { transaction_arrive(barrier, bytes, site); }
KD_DEVICE bool barrier_test(saddr barrier, u32 parity, KD_SITE) { return transaction_test(barrier, parity, site); }
KD_DEVICE void barrier_wait(saddr barrier, u32 parity, KD_SITE) { transaction_wait(barrier, parity, site); }
KD_DEVICE void bulk_copy(saddr to, const void* from, u32 bytes, saddr barrier, KD_SITE) { transaction_copy(to, from, bytes, barrier, site); }
KD_DEVICE void async_proxy_fence() {}
KD_DEVICE void grid_wait() {}  // launches of a stream run one after another
KD_DEVICE void grid_release() {}
KD_DEVICE void set_loop_condition(u64, bool, KD_SITE) { fault(site, "there are no loops of graphs on the host: the handle must be 0"); }

// ---------------------------------------------------------------------------------------------- global memory
template <class T> KD_DEVICE T load_constant(const T* p) { return *p; }
KD_DEVICE vec4 load_stream(const vec4* p) { return *p; }
KD_DEVICE void fence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
KD_DEVICE u32 load_acquire(const u32* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
KD_DEVICE void store_release(u32* p, u32 v) { __atomic_store_n(p, v, __ATOMIC_RELEASE), moved(); }
template <class T> KD_DEVICE T atomic_swap_if(T* p, T expected, T v) {
  if (__atomic_compare_exchange(p, &expected, &v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) moved();
  return expected;
}
template <class T, class F> KD_DEVICE T atomic_update(T* p, F next) {
  T old;
  __atomic_load(p, &old, __ATOMIC_RELAXED);
  for (T value = next(old); !__atomic_compare_exchange(p, &old, &value, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED); value = next(old)) {}
  if (next(old) != old) moved();
  return old;
}
template <class T> KD_DEVICE T atomic_add(T* p, T v) { return atomic_update(p, [v](T old) { return static_cast<T>(old + v); }); }
template <class T> KD_DEVICE T atomic_max(T* p, T v) { return atomic_update(p, [v](T old) { return old > v ? old : v; }); }
template <class T> KD_DEVICE T atomic_exchange(T* p, T v) { return atomic_update(p, [v](T) { return v; }); }

// ---------------------------------------------------------------------------------------------- arithmetic
template <class To, class From> KD_DEVICE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}
KD_DEVICE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
KD_DEVICE double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
KD_DEVICE float sqrt(float x) { return __builtin_sqrtf(x); }
KD_DEVICE u32 bits_of(float x) { return bit_cast<u32>(x); }
KD_DEVICE float float_of(u32 x) { return bit_cast<float>(x); }
KD_DEVICE float exp2_approx(float x) {
  const float y = exp2f(x);
  return y < 1.17549435e-38f ? 0.f : y;
}
KD_DEVICE float min(float a, float b) { return fminf(a, b); }
KD_DEVICE float max(float a, float b) { return fmaxf(a, b); }
KD_DEVICE u32 min(u32 a, u32 b) { return a < b ? a : b; }
KD_DEVICE u32 max(u32 a, u32 b) { return a > b ? a : b; }
KD_DEVICE i32 min(i32 a, i32 b) { return a < b ? a : b; }
KD_DEVICE i32 max(i32 a, i32 b) { return a > b ? a : b; }
KD_DEVICE u32 popcount(u32 x) { return static_cast<u32>(__builtin_popcount(x)); }
KD_DEVICE u32 lowest_bit(u32 x) { return x ? static_cast<u32>(__builtin_ctz(x)) : 0xffffffffu; }
KD_DEVICE u32 leading_zeros(u32 x) { return x ? static_cast<u32>(__builtin_clz(x)) : 32; }
KD_DEVICE u32 byte_select(u32 a, u32 b, u32 selector) {
  const u64 both = static_cast<u64>(b) << 32 | a;
  u32 out = 0;
  for (u32 i = 0; i < 4; i++) out |= (static_cast<u32>(both >> 8 * (selector >> 4 * i & 7)) & 255) << 8 * i;
  return out;
}
KD_DEVICE double infinity() { return HUGE_VAL; }
KD_DEVICE u32 round_to_u32(float x) {
  if (!(x > 0.f)) return 0;
  return x >= 4294967296.f ? 0xffffffffu : static_cast<u32>(static_cast<u64>(nearbyintf(x)));
}
KD_DEVICE i32 round_to_i32(float x) {
  if (!(x == x)) return 0;
  return x >= 2147483648.f ? 2147483647 : x < -2147483648.f ? -2147483647 - 1 : static_cast<i32>(nearbyintf(x));
}
KD_DEVICE float to_float(bf16 x) { return float_of(static_cast<u32>(x.bits) << 16); }
KD_DEVICE bf16 to_bf16(float x) {
  const u32 bits = bits_of(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return bf16{0x7fff};  // the GPU's canonical NaN
  return bf16{static_cast<u16>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16)};
}
KD_DEVICE u32 opaque(u32 x) { return x; }
KD_DEVICE u32 pack_bf16(float low, float high) { return static_cast<u32>(to_bf16(high).bits) << 16 | to_bf16(low).bits; }
KD_DEVICE u32 add_bf16x2(u32 a, u32 b) {  // a sum of two bf16 has the same rounding by way of float
  return pack_bf16(float_of(a << 16) + float_of(b << 16), float_of(a & 0xffff0000u) + float_of(b & 0xffff0000u));
}

}  // namespace kd
