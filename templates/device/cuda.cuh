// The primitives every kernel template is written in: CUDA bodies. `host.hpp` has the same names for the host target.
//
// Templates hold no PTX and no CUDA built-ins: only these names, so that one text serves both targets. Every primitive is
// described once, here. Addresses in shared memory are `kd::saddr` values, made by `shared_at(offset)`; plain pointers into
// shared memory come from `shared<T>(offset)`. Everything warp-wide must be reached by all lanes of its mask.
#pragma once

#ifndef KD_HAS_BULK_COPY  // what the target can do: set by the renderer from the target table
#define KD_HAS_BULK_COPY 1
#endif

namespace kd {

using u8 = unsigned char;
using i8 = signed char;
using u16 = unsigned short;
using i16 = short;
using u32 = unsigned int;
using i32 = int;
using u64 = unsigned long long;
using i64 = long long;

struct bf16 { u16 bits; };  // the upper half of a float
struct f16 { u16 bits; };
struct alignas(8) vec2 { u32 x, y; };
struct alignas(16) vec4 { u32 x, y, z, w; };  // the 16-byte unit of every wide access

using saddr = u32;  // an address in shared memory
constexpr u32 all_lanes = 0xffffffffu;

#define KD_DEVICE __device__ __forceinline__
#define KD_KERNEL(threads, min_blocks) extern "C" __global__ void __launch_bounds__(threads, min_blocks)
#define KD_UNROLL _Pragma("unroll")
#define KD_NO_UNROLL _Pragma("unroll 1")

// ---------------------------------------------------------------------------------------------- where a thread is
KD_DEVICE u32 thread() { return threadIdx.x; }       // in its block; blocks are one-dimensional
KD_DEVICE u32 lane() { return threadIdx.x & 31; }
KD_DEVICE u32 warp() { return threadIdx.x >> 5; }
KD_DEVICE u32 block_x() { return blockIdx.x; }
KD_DEVICE u32 block_y() { return blockIdx.y; }
KD_DEVICE u32 block_z() { return blockIdx.z; }
KD_DEVICE u32 blocks_x() { return gridDim.x; }
KD_DEVICE u32 blocks_y() { return gridDim.y; }
KD_DEVICE u32 blocks_z() { return gridDim.z; }

// ---------------------------------------------------------------------------------------------- shared memory
extern __shared__ __align__(1024) u8 shared_arena[];
template <class T> KD_DEVICE T* shared(u32 offset) { return reinterpret_cast<T*>(shared_arena + offset); }
KD_DEVICE saddr shared_at(u32 offset) { return static_cast<u32>(__cvta_generic_to_shared(shared_arena)) + offset; }

// ---------------------------------------------------------------------------------------------- barriers
KD_DEVICE void block_sync() { __syncthreads(); }
// Barrier `id` (1..15) among `threads` threads (a multiple of 32) of the block.
KD_DEVICE void named_sync(u32 id, u32 threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
// Counts the caller in without waiting.
KD_DEVICE void named_arrive(u32 id, u32 threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
KD_DEVICE void warp_sync(u32 mask = all_lanes) { __syncwarp(mask); }

// ---------------------------------------------------------------------------------------------- warp exchange (4- or 8-byte types)
template <class T> KD_DEVICE T shfl(T value, u32 source, u32 mask = all_lanes) { return __shfl_sync(mask, value, source); }
template <class T> KD_DEVICE T shfl_xor(T value, u32 bits, u32 mask = all_lanes) { return __shfl_xor_sync(mask, value, bits); }
template <class T> KD_DEVICE T shfl_up(T value, u32 by, u32 mask = all_lanes) { return __shfl_up_sync(mask, value, by); }
template <class T> KD_DEVICE T shfl_down(T value, u32 by, u32 mask = all_lanes) { return __shfl_down_sync(mask, value, by); }
KD_DEVICE u32 ballot(bool vote, u32 mask = all_lanes) { return __ballot_sync(mask, vote); }
KD_DEVICE bool any(bool vote, u32 mask = all_lanes) { return __any_sync(mask, vote); }
KD_DEVICE bool all(bool vote, u32 mask = all_lanes) { return __all_sync(mask, vote); }
KD_DEVICE u32 reduce_max(u32 value, u32 mask = all_lanes) { return __reduce_max_sync(mask, value); }
KD_DEVICE u32 reduce_min(u32 value, u32 mask = all_lanes) { return __reduce_min_sync(mask, value); }
KD_DEVICE u32 reduce_add(u32 value, u32 mask = all_lanes) { return __reduce_add_sync(mask, value); }
KD_DEVICE u32 reduce_or(u32 value, u32 mask = all_lanes) { return __reduce_or_sync(mask, value); }

// ---------------------------------------------------------------------------------------------- matrix fragments
// Lane 4g+t of an 8×8 matrix of 16-bit elements holds row g, columns 2t and 2t+1. Lanes 8i..8i+7 give the row addresses of
// matrix i (16 bytes each, 16-byte aligned); `_trans` delivers the transposed matrices.
KD_DEVICE void ldmatrix_x4(u32 (&r)[4], saddr row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(row) : "memory");
}
KD_DEVICE void ldmatrix_x4_trans(u32 (&r)[4], saddr row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(row) : "memory");
}
KD_DEVICE void ldmatrix_x2(u32 (&r)[2], saddr row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(row) : "memory");
}
KD_DEVICE void ldmatrix_x2_trans(u32 (&r)[2], saddr row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(row) : "memory");
}
// Transposes one 8×8 matrix held as above.
KD_DEVICE u32 movmatrix_trans(u32 value) {
  u32 out;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(value));
  return out;
}
// c += A·B with A 16×16 (a[0]: rows 0-7, columns 0-7; a[1]: rows 8-15; a[2], a[3]: columns 8-15) and B 16×8 (b[0]: rows 0-7).
// c[0], c[1]: row g, columns 2t, 2t+1; c[2], c[3]: row g+8. Column j of c depends on column j of B alone.
KD_DEVICE void mma_bf16(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// ---------------------------------------------------------------------------------------------- asynchronous copies by threads
// Copies `valid` (0 or up to 16) bytes from global to shared memory and fills the rest of the 16 with zeros; with valid = 0 the
// source is not read. Done after `cp_async_wait`, for the calling thread; others also need a barrier.
KD_DEVICE void cp_async_16(saddr to, const void* from, u32 valid = 16) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(__cvta_generic_to_global(from)), "r"(valid) : "memory");
}
KD_DEVICE void cp_async_4(saddr to, const void* from, u32 valid = 4) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(__cvta_generic_to_global(from)), "r"(valid) : "memory");
}
KD_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `Pending` of the caller's newest groups are unfinished.
template <u32 Pending> KD_DEVICE void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory"); }

// ---------------------------------------------------------------------------------------------- transaction barriers, bulk copies
// A barrier is 8 bytes of shared memory. A phase ends when `arrivals` threads have arrived and all expected bytes have landed.
KD_DEVICE void barrier_init(saddr barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to the copy engine; one thread calls it after `barrier_init`, before `block_sync`.
KD_DEVICE void barrier_init_fence() {
#if KD_HAS_BULK_COPY
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
KD_DEVICE void barrier_arrive(saddr barrier) {
  asm volatile("{ .reg .b64 t; mbarrier.arrive.shared::cta.b64 t, [%0]; }" ::"r"(barrier) : "memory");
}
#if KD_HAS_BULK_COPY
// Arrives and announces `bytes` that bulk copies will bring in this phase.
KD_DEVICE void barrier_expect(saddr barrier, u32 bytes) {
  asm volatile("{ .reg .b64 t; mbarrier.arrive.expect_tx.shared::cta.b64 t, [%0], %1; }" ::"r"(barrier), "r"(bytes) : "memory");
}
// True once the phase of the given parity has ended (phases count from 0).
KD_DEVICE bool barrier_test(saddr barrier, u32 parity) {
  u32 done;
  asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  return done != 0;
}
KD_DEVICE void barrier_wait(saddr barrier, u32 parity) {
  while (!barrier_test(barrier, parity)) {}
}
// One thread starts a copy of `bytes` (a multiple of 16; both ends 16-byte aligned) that reports to `barrier` when it lands.
KD_DEVICE void bulk_copy(saddr to, const void* from, u32 bytes, saddr barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier) : "memory");
}
// Orders ordinary accesses to shared memory before later ones of the copy engine.
KD_DEVICE void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Programmatic dependent launch: wait for the predecessor's results; let the successor start.
KD_DEVICE void grid_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
KD_DEVICE void grid_release() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
#else
KD_DEVICE void grid_wait() {}
KD_DEVICE void grid_release() {}
#endif

#ifdef __CUDACC_RDC__
// The condition of the graph's loop with this handle. Only for families of the device runtime: the driver links the function in.
KD_DEVICE void set_loop_condition(u64 handle, bool goes_on) { cudaGraphSetConditional(handle, goes_on ? 1 : 0); }
#endif

// ---------------------------------------------------------------------------------------------- global memory
// Read-only data, cached; `T` of 4, 8 or 16 bytes.
template <class T> KD_DEVICE T load_constant(const T* p) {
  if constexpr (sizeof(T) == 16) {
    const uint4 v = __ldg(reinterpret_cast<const uint4*>(p));
    return *reinterpret_cast<const T*>(&v);
  } else if constexpr (sizeof(T) == 8) {
    const uint2 v = __ldg(reinterpret_cast<const uint2*>(p));
    return *reinterpret_cast<const T*>(&v);
  } else {
    const u32 v = __ldg(reinterpret_cast<const u32*>(p));
    return *reinterpret_cast<const T*>(&v);
  }
}
// Data read once: does not displace what L1 holds.
KD_DEVICE vec4 load_stream(const vec4* p) {
  vec4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
// Order between blocks: data written before `fence` is visible to whoever sees what is written after it.
KD_DEVICE void fence() { __threadfence(); }
KD_DEVICE u32 load_acquire(const u32* p) {
  u32 v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
KD_DEVICE void store_release(u32* p, u32 v) { asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
// Atomics return the old value. `T`: u32, i32, u64; `atomic_add` also float.
template <class T> KD_DEVICE T atomic_add(T* p, T v) { return atomicAdd(p, v); }
template <class T> KD_DEVICE T atomic_max(T* p, T v) { return atomicMax(p, v); }
template <class T> KD_DEVICE T atomic_exchange(T* p, T v) { return atomicExch(p, v); }
template <class T> KD_DEVICE T atomic_swap_if(T* p, T expected, T v) { return atomicCAS(p, expected, v); }
// Inside loops that wait for another block.
KD_DEVICE void spin_pause() { __nanosleep(20); }

// ---------------------------------------------------------------------------------------------- arithmetic
// Plain + - * / round each operation (the compiler fuses nothing); a fused multiply-add is asked for by name.
KD_DEVICE float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
KD_DEVICE double fma(double a, double b, double c) { return __fma_rn(a, b, c); }
KD_DEVICE float sqrt(float x) { return __fsqrt_rn(x); }
KD_DEVICE float exp2_approx(float x) {  // 2 ulp; results below 2^-126 are 0
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
KD_DEVICE float min(float a, float b) { return fminf(a, b); }  // a NaN operand is ignored
KD_DEVICE float max(float a, float b) { return fmaxf(a, b); }
KD_DEVICE u32 min(u32 a, u32 b) { return a < b ? a : b; }
KD_DEVICE u32 max(u32 a, u32 b) { return a > b ? a : b; }
KD_DEVICE i32 min(i32 a, i32 b) { return a < b ? a : b; }
KD_DEVICE i32 max(i32 a, i32 b) { return a > b ? a : b; }
KD_DEVICE u32 popcount(u32 x) { return __popc(x); }
KD_DEVICE u32 lowest_bit(u32 x) { return __ffs(x) - 1; }  // its number; 0xffffffff for x = 0
KD_DEVICE u32 leading_zeros(u32 x) { return __clz(x); }
// Byte i of the result is byte (selector >> 4i & 7) of b:a.
KD_DEVICE u32 byte_select(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }
KD_DEVICE u32 bits_of(float x) { return __float_as_uint(x); }
KD_DEVICE float float_of(u32 x) { return __uint_as_float(x); }
KD_DEVICE double infinity() { return __longlong_as_double(0x7ff0000000000000ll); }
KD_DEVICE u32 round_to_u32(float x) { return __float2uint_rn(x); }  // to nearest even, saturating; NaN gives 0
KD_DEVICE i32 round_to_i32(float x) { return __float2int_rn(x); }
KD_DEVICE float to_float(bf16 x) { return __uint_as_float(static_cast<u32>(x.bits) << 16); }
KD_DEVICE bf16 to_bf16(float x) {  // to nearest even
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bf16{bits};
}
// The value itself, in a way that the compiler cannot compute ahead or share: what depends on it is not moved out of a loop.
KD_DEVICE u32 opaque(u32 x) {
  asm volatile("" : "+r"(x));
  return x;
}
KD_DEVICE u32 pack_bf16(float low, float high) {
  u32 bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}
// The sums of two pairs of bf16, each to nearest even.
KD_DEVICE u32 add_bf16x2(u32 a, u32 b) {
  u32 sums;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sums) : "r"(a), "r"(0x3f803f80u), "r"(b));
  return sums;
}

}  // namespace kd
