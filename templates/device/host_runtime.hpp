// What the host target's primitives (`host.hpp`) ask of its scheduler (`host_runtime.cpp`).
//
// Every CUDA thread is a fiber with its own stack. The fibers of a block run on one OS thread, one at a time, and hand over
// only inside a primitive that must wait; blocks spread over cores. A warp collective is carried out by the last lane to
// arrive. Which fiber runs next, and when an asynchronous copy lands, are chosen by seed, so that a missing barrier or wait
// shows as a result that changes.
#pragma once
#include <cstddef>
#include <cstdint>

namespace kd {

using u8 = std::uint8_t;
using i8 = std::int8_t;
using u16 = std::uint16_t;
using i16 = std::int16_t;
using u32 = std::uint32_t;
using i32 = std::int32_t;
using u64 = unsigned long long;
using i64 = long long;

// Where in the template a primitive was called: default arguments are evaluated at the call, and `#line` marks make that the
// template's file and line.
struct Site {
  const char* file;
  int line;
  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
};
#define KD_SITE kd::Site site = kd::Site::here()

// Launch parameters; the Python runtime mirrors this struct.
struct LaunchConfig {
  u32 grid[3];
  u32 block;
  u32 shared_bytes;
  u32 cooperative;  // all blocks are alive together, on one OS thread
  u32 threads;      // OS threads; 0 = one per core
  u32 order;        // which fiber runs next: 0 first ready, 1 last ready, 2 random
  u32 copies;       // when asynchronous copies land: 0 at once, 1 as late as allowed, 2 random
  u64 seed;
};

// Bytes of the shared arena that nobody may touch; a list ends with {0, 0}.
struct RedZone {
  u32 offset, bytes;
};

// What a fiber may know about itself; set whenever it is resumed.
struct Self {
  u32 thread, block[3], grid[3], threads;
  u8* shared;
};
extern thread_local const Self* self;

enum class Warp : u8 { sync, shfl, ballot, reduce, ldmatrix, ldmatrix_trans, movmatrix, mma };
using Execute = void (*)(const void* const* in, void* const* out, u32 mask, u32 parameter);

// Waits until every lane of `mask` has called with the same `kind` from the same site, then runs `execute` once. `in` and `out`
// are the caller's own variables.
void warp_collective(Warp kind, u32 mask, const void* in, void* out, Execute execute, u32 parameter, Site site);
void block_barrier(u32 id, u32 threads, bool wait, Site site);  // threads = 0: the whole block

void thread_copy(u8* to, const void* from, u32 bytes, u32 valid, Site site);
void thread_copy_commit();
void thread_copy_wait(u32 pending);

void transaction_init(u8* barrier, u32 arrivals, Site site);
void transaction_arrive(u8* barrier, u32 expected_bytes, Site site);
bool transaction_test(u8* barrier, u32 parity, Site site);
void transaction_wait(u8* barrier, u32 parity, Site site);
void transaction_copy(u8* to, const void* from, u32 bytes, u8* barrier, Site site);

void moved();             // something that another thread may be waiting for has changed
void spin_pause(KD_SITE);  // lets others run; loops that wait for another block call it

void execute_shfl_4(const void* const* in, void* const* out, u32 mask, u32 parameter);
void execute_shfl_8(const void* const* in, void* const* out, u32 mask, u32 parameter);
void execute_ballot(const void* const* in, void* const* out, u32 mask, u32 parameter);
void execute_reduce(const void* const* in, void* const* out, u32 mask, u32 parameter);
void execute_ldmatrix(const void* const* in, void* const* out, u32 mask, u32 parameter);
void execute_ldmatrix_trans(const void* const* in, void* const* out, u32 mask, u32 parameter);
void execute_movmatrix(const void* const* in, void* const* out, u32 mask, u32 parameter);
void execute_mma_bf16(const void* const* in, void* const* out, u32 mask, u32 parameter);

// Stops the launch with a message about the calling thread.
[[noreturn]] void fault(Site site, const char* format, ...) __attribute__((format(printf, 2, 3)));

// Runs a grid. Returns 0, or 1 with the fault's text in `message`.
int run_grid(void (*body)(void* const*), void* const* args, const LaunchConfig& config, const RedZone* zones, char* message,
             std::size_t message_bytes);

}  // namespace kd
