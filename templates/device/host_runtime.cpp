// The host target's scheduler: fibers, barriers, warp collectives, asynchronous copies, faults. See `host_runtime.hpp`.
#include "host_runtime.hpp"

#include <csetjmp>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#define KD_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define KD_ASAN 1
#endif
#endif
#ifdef KD_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#else
#define __asan_poison_memory_region(p, n) ((void)(p), (void)(n))
#define __asan_unpoison_memory_region(p, n) ((void)(p), (void)(n))
#endif

#include "host_switch.hpp"
#include "host_warp.hpp"

namespace kd {

thread_local const Self* self = nullptr;

namespace {

constexpr std::size_t stack_bytes = KD_STACK_BYTES, guard_bytes = 256;
constexpr u16 canary = 0x7fc1;  // a NaN in bf16 and in f32, an absurd index in i32

// A small counter-based generator: the same seed gives the same schedule everywhere.
struct Random {
  u64 state;
  u64 next() {
    u64 z = (state += 0x9e3779b97f4a7c15ull);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
  }
  u32 below(u32 n) { return static_cast<u32>((next() >> 32) * n >> 32); }
};

enum class State : u8 { ready, block_barrier, warp, transaction, done };

struct Copy {  // asynchronous, not landed yet
  u8* to;
  const void* from;
  u32 bytes, valid;
  u8* barrier;  // bulk copies only
  u32 group;    // thread copies only
};

struct Block;
struct Fiber {
  Context context;
  Self view;
  Block* block = nullptr;
  State state = State::ready;
  Site site{"", 0};
  u32 wait_id = 0;              // which named barrier
  const u8* wait_barrier = nullptr;
  u32 wait_parity = 0, group = 0, priority = 0;
  std::vector<Copy> copies;
};

struct Meeting {  // a warp collective that is not complete
  Warp kind;
  u32 mask, arrived, parameter;
  Site site;
  const void* in[32];
  void* out[32];
};

struct NamedBarrier {
  u32 arrived = 0, expected = 0;
};

struct Block {
  std::vector<Fiber> fibers;
  std::vector<std::vector<Meeting>> meetings;  // by warp
  NamedBarrier barriers[16];
  u32 alive = 0;
  u8* arena = nullptr;  // guard | shared memory | guard
  u8* shared = nullptr;
};

struct Group;
thread_local Group* group = nullptr;

// The blocks that are alive together on one OS thread: one, or all of a cooperative grid.
// Which OS threads of a launch wait for each other. One that sleeps in vain counts its sleeps, and whoever falls asleep after having moved sets all
// counts back. When every thread still at work has slept `patience` times, none of them can ever wake another.
class Sleepers {
 public:
  explicit Sleepers(u32 workers) : sleeps_(workers) {}
  void someone_moved() {
    for (auto& s : sleeps_)
      if (s != gone) s = 0;
  }
  void leave(u32 worker) {
    someone_moved();
    sleeps_[worker] = gone;
  }
  bool sleep(u32 worker) {  // false: all sleep for ever
    usleep(20);
    sleeps_[worker]++;
    for (const auto& s : sleeps_)
      if (s < patience) return true;
    return false;
  }

 private:
  static constexpr u32 patience = 4000, gone = 1u << 31;
  std::vector<std::atomic<u32>> sleeps_;
};

struct Group {
  Sleepers& sleepers;
  const u32 worker;
  const LaunchConfig& config;
  const RedZone* zones;
  void (*body)(void* const*);
  void* const* args;
  Random random;
  std::vector<Block> blocks;
  std::vector<Fiber*> ready;
  std::size_t first_ready = 0;
  std::vector<Copy> copies;  // bulk copies in flight
  Fiber* current = nullptr;
  Context scheduler;
  sigjmp_buf crash;
  std::string message;
  u64 progress = 0, spun_at = 0, spins = 0;  // events that may end a wait; the count at the last spin; spins since

  Group(Sleepers& s, u32 w, const LaunchConfig& c, const RedZone* z, void (*b)(void* const*), void* const* a, u64 seed)
      : sleepers(s), worker(w), config(c), zones(z), body(b), args(a), random{seed} {}

  void run(const std::vector<u32>& block_numbers, char* stacks);
  void start_block(Block& block, u32 number, char*& stacks);
  void finish_block(Block& block);
  void resume(Fiber* fiber);
  Fiber* pick();
  bool land_one(bool forced);
  void release(Fiber& fiber) {
    fiber.state = State::ready;
    ready.push_back(&fiber);
    progress++;
  }
  bool lands_now() { return config.copies == 0 || (config.copies == 2 && random.below(2)); }
  std::string deadlock() const;
};

void hand_over() {
  Group* g = group;
  switch_context(g->current->context, g->scheduler);
}

std::string describe(const Fiber& f) {
  char text[96];
  std::snprintf(text, sizeof text, "thread %u of block (%u, %u, %u)", f.view.thread, f.view.block[0], f.view.block[1], f.view.block[2]);
  return text;
}

// ------------------------------------------------------------------------------------------------ asynchronous copies
void land(const Copy& copy) {
  __asan_unpoison_memory_region(copy.to, copy.bytes);
  if (copy.valid) std::memcpy(copy.to, copy.from, copy.valid);
  std::memset(copy.to + copy.valid, 0, copy.bytes - copy.valid);
}

// Until a copy lands its destination holds NaN patterns, and in sanitizer builds may not be touched at all.
void take_off(const Copy& copy) {
  __asan_unpoison_memory_region(copy.to, copy.bytes);
  std::memset(copy.to, 0xff, copy.bytes);
  __asan_poison_memory_region(copy.to, copy.bytes);
}

void check_destination(const Fiber& f, const u8* to, u32 bytes, const char* what, Site site) {
  const u32 size = group->config.shared_bytes;
  if (to < f.block->shared || to + bytes > f.block->shared + size)
    fault(site, "%s writes %u bytes at shared offset %lld, outside the block's %u", what, bytes, static_cast<long long>(to - f.block->shared), size);
}

// A transaction barrier as its 8 bytes: phase parity, arrivals per phase, arrivals still missing, bytes still missing. `unmade` is 0 in
// an initialised one: shared memory starts as all ones, which must not pass for a barrier.
struct Transaction {
  u32 phase : 1, expected : 15, pending : 15, unmade : 1;
  i32 bytes;
};
static_assert(sizeof(Transaction) == 8);

Transaction load_transaction(const u8* barrier, Site site) {
  const Fiber& f = *group->current;
  if (barrier < f.block->shared || barrier + 8 > f.block->shared + group->config.shared_bytes || (barrier - f.block->shared) % 8)
    fault(site, "a barrier at shared offset %lld is misplaced", static_cast<long long>(barrier - f.block->shared));
  Transaction t;
  std::memcpy(&t, barrier, 8);
  if (t.unmade || !t.expected || t.pending > t.expected) fault(site, "the barrier at shared offset %lld was not initialised", static_cast<long long>(barrier - f.block->shared));
  return t;
}

void store_transaction(u8* barrier, Transaction t) {
  if (t.pending == 0 && t.bytes == 0) {
    t.phase ^= 1;
    t.pending = t.expected;
    for (Block& block : group->blocks)
      for (Fiber& f : block.fibers)
        if (f.state == State::transaction && f.wait_barrier == barrier && f.wait_parity != t.phase) group->release(f);
  }
  std::memcpy(barrier, &t, 8);
}

void land_bulk(const Copy& copy) {
  land(copy);
  Transaction t;
  std::memcpy(&t, copy.barrier, 8);
  t.bytes -= static_cast<i32>(copy.bytes);
  store_transaction(copy.barrier, t);
}

// ------------------------------------------------------------------------------------------------ scheduling
Fiber* Group::pick() {
  const std::size_t n = ready.size() - first_ready;
  if (config.order == 0) {
    Fiber* f = ready[first_ready++];
    if (first_ready > 1024 && first_ready * 2 > ready.size()) {
      ready.erase(ready.begin(), ready.begin() + static_cast<std::ptrdiff_t>(first_ready));
      first_ready = 0;
    }
    return f;
  }
  std::size_t at = ready.size() - 1;
  if (config.order == 2) {
    // The better of two random picks by a priority that changes now and then: some fibers run far ahead of others.
    at = first_ready + random.below(static_cast<u32>(n));
    const std::size_t other = first_ready + random.below(static_cast<u32>(n));
    if (ready[other]->priority > ready[at]->priority) at = other;
    if (random.below(64) == 0) ready[at]->priority = static_cast<u32>(random.next());
  }
  Fiber* f = ready[at];
  ready[at] = ready.back();
  ready.pop_back();
  return f;
}

bool Group::land_one(bool forced) {
  if (copies.empty() || !(forced || (config.copies == 2 && random.below(8) == 0))) return false;
  const std::size_t at = config.copies == 2 ? random.below(static_cast<u32>(copies.size())) : 0;
  const Copy copy = copies[at];
  copies.erase(copies.begin() + static_cast<std::ptrdiff_t>(at));
  progress++;
  land_bulk(copy);
  return true;
}

void fiber_main() {
  Group* g = group;
  enter_context(g->current->context, g->scheduler);
  g->body(g->args);
  Fiber& f = *group->current;
  Block& b = *f.block;
  f.state = State::done;
  b.alive--;
  // Threads that have exited no longer count in the block's barrier, as on the GPU.
  NamedBarrier& whole = b.barriers[0];
  if (whole.arrived && whole.arrived == b.alive) {
    whole.arrived = 0;
    for (Fiber& x : b.fibers)
      if (x.state == State::block_barrier && x.wait_id == 0) group->release(x);
  }
  leave_context(f.context, group->scheduler);
}

void Group::start_block(Block& block, u32 number, char*& stacks) {
  const u32 n = config.block, size = config.shared_bytes;
  block.arena = static_cast<u8*>(std::aligned_alloc(1024, (size + 4 * 1024) / 1024 * 1024));
  block.shared = block.arena + 1024;
  for (u32 i = 0; i < 1024; i += 2) std::memcpy(block.arena + i, &canary, 2);
  for (u32 i = 0; i + 2 <= guard_bytes; i += 2) std::memcpy(block.shared + size + i, &canary, 2);
  // Uninitialised shared memory reads as NaN; under a random schedule every second block reads as noise instead.
  if (config.order == 2 && random.below(2))
    for (u32 i = 0; i < size; i++) block.shared[i] = static_cast<u8>(random.next() >> 56);
  else
    std::memset(block.shared, 0xff, size);
  for (const RedZone* z = zones; z->bytes; z++) {
    for (u32 i = 0; i + 2 <= z->bytes; i += 2) std::memcpy(block.shared + z->offset + i, &canary, 2);
    __asan_poison_memory_region(block.shared + z->offset, z->bytes);
  }
  __asan_poison_memory_region(block.arena, 1024);
  __asan_poison_memory_region(block.shared + size, guard_bytes);
  block.fibers = std::vector<Fiber>(n);
  block.meetings.assign((n + 31) / 32, {});
  block.alive = n;
  const u32 gx = config.grid[0], gy = config.grid[1];
  for (u32 i = 0; i < n; i++) {
    Fiber& f = block.fibers[i];
    f.view = Self{i, {number % gx, number / gx % gy, number / gx / gy}, {gx, gy, config.grid[2]}, n, block.shared};
    f.block = &block;
    f.priority = static_cast<u32>(random.next());
    make_context(f.context, stacks, stack_bytes, i, fiber_main);
    stacks += stack_bytes;
    ready.push_back(&f);
  }
}

void Group::finish_block(Block& block) {
  const u32 size = config.shared_bytes;
  __asan_unpoison_memory_region(block.arena, 1024 + size + guard_bytes);
  auto check = [&](const u8* from, u32 bytes, const char* where, i64 offset) {
    for (u32 i = 0; i + 2 <= bytes && message.empty(); i += 2)
      if (std::memcmp(from + i, &canary, 2)) {
        char text[160];
        const u32* b = block.fibers[0].view.block;
        std::snprintf(text, sizeof text, "block (%u, %u, %u) wrote %s (shared offset %lld)", b[0], b[1], b[2], where, offset + i);
        message = text;
      }
  };
  if (message.empty()) {
    check(block.shared + size, guard_bytes, "past the end of its shared memory", size);
    check(block.shared - guard_bytes, guard_bytes, "before the start of its shared memory", -static_cast<i64>(guard_bytes));
    for (const RedZone* z = zones; z->bytes; z++) check(block.shared + z->offset, z->bytes, "past the end of a shared-memory region", z->offset);
  }
  std::free(block.arena);
  block.arena = nullptr;
}

void Group::resume(Fiber* fiber) {
  current = fiber;
  self = &fiber->view;
  switch_context(scheduler, fiber->context);
  self = nullptr;
}

void Group::run(const std::vector<u32>& block_numbers, char* stacks) {
  group = this;
  blocks = std::vector<Block>(block_numbers.size());
  for (std::size_t i = 0; i < blocks.size(); i++) start_block(blocks[i], block_numbers[i], stacks);
  // A crash inside a fiber comes back here (`on_crash`).
  if (sigsetjmp(crash, 1) == 0) {
    while (message.empty()) {
      land_one(false);
      if (ready.size() == first_ready) {
        if (land_one(true)) continue;
        break;
      }
      resume(pick());
    }
  }
  self = nullptr;
  if (message.empty())
    for (const Block& block : blocks)
      if (block.alive) {
        message = deadlock();
        break;
      }
  for (Block& block : blocks) finish_block(block);
  group = nullptr;
}

// Who waits where, like threads together.
std::string Group::deadlock() const {
  std::string text = "deadlock: ";
  std::map<std::string, std::vector<const Fiber*>> waits;
  for (const Block& block : blocks)
    for (const Fiber& f : block.fibers)
      if (f.state != State::done) {
        const char* what = f.state == State::warp ? "a warp collective" : f.state == State::transaction ? "a transaction barrier" : "the block barrier";
        char where[400];
        std::snprintf(where, sizeof where, "%s at %s:%d", f.state == State::block_barrier && f.wait_id ? "a named barrier" : what, f.site.file, f.site.line);
        waits[where].push_back(&f);
      }
  bool first = true;
  for (const auto& [where, fibers] : waits) {
    text += (first ? "" : "; ") + describe(*fibers.front());
    if (fibers.size() > 1) text += " and " + std::to_string(fibers.size() - 1) + " more";
    text += fibers.size() > 1 ? " wait for " + where : " waits for " + where;
    first = false;
  }
  std::size_t exited = 0;
  for (const Block& block : blocks) exited += block.fibers.size() - block.alive;
  return text + "; " + std::to_string(exited) + " threads have exited";
}

// ------------------------------------------------------------------------------------------------ crashes
const int crash_signals[] = {SIGSEGV, SIGBUS, SIGFPE};
struct sigaction previous_action[3];

void on_crash(int number, siginfo_t* info, void* context) {
  Group* g = group;
  if (!g || !self) {  // not ours: whoever was there before decides
    for (int i = 0; i < 3; i++)
      if (crash_signals[i] == number) {
        const struct sigaction& old = previous_action[i];
        if (old.sa_flags & SA_SIGINFO) return old.sa_sigaction(number, info, context);
        if (old.sa_handler != SIG_DFL && old.sa_handler != SIG_IGN) return old.sa_handler(number);
      }
    signal(number, SIG_DFL);
    raise(number);
    return;
  }
  char text[256];
  std::snprintf(text, sizeof text, "%s %s (address %p); last primitive reached: %s:%d", describe(*g->current).c_str(),
                number == SIGFPE ? "divided by zero" : "touched memory that does not exist", info->si_addr, g->current->site.file, g->current->site.line);
  g->message = text;
  siglongjmp(g->crash, 1);
}

// Installed while launches run; a handler needs its own stack, since a fiber's may be what overflowed.
struct CrashGuard {
  static std::mutex lock;
  static int users;
  CrashGuard() {
#ifndef KD_ASAN
    std::lock_guard<std::mutex> hold(lock);
    if (users++ == 0)
      for (int i = 0; i < 3; i++) {
        struct sigaction action {};
        action.sa_sigaction = on_crash;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        sigaction(crash_signals[i], &action, &previous_action[i]);
      }
#endif
  }
  ~CrashGuard() {
#ifndef KD_ASAN
    std::lock_guard<std::mutex> hold(lock);
    if (--users == 0)
      for (int i = 0; i < 3; i++) sigaction(crash_signals[i], &previous_action[i], nullptr);
#endif
  }
};
std::mutex CrashGuard::lock;
int CrashGuard::users = 0;

struct SignalStack {
  stack_t before{};
  std::vector<char> memory = std::vector<char>(64 * 1024);
  SignalStack() {
    stack_t mine{};
    mine.ss_sp = memory.data();
    mine.ss_size = memory.size();
    sigaltstack(&mine, &before);
  }
  ~SignalStack() { sigaltstack(&before, nullptr); }
};

// Fiber stacks are kept from launch to launch. Each ends in a page that may not be touched.
struct StackPool {
  std::mutex lock;
  std::multimap<std::size_t, char*> free_sets;
  std::pair<char*, std::size_t> take(std::size_t count) {
    {
      std::lock_guard<std::mutex> hold(lock);
      auto found = free_sets.lower_bound(count);
      if (found != free_sets.end()) {
        auto set = std::make_pair(found->second, found->first);
        free_sets.erase(found);
        return set;
      }
    }
    void* p = mmap(nullptr, count * stack_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return {nullptr, 0};
    for (std::size_t i = 0; i < count; i++) mprotect(static_cast<char*>(p) + i * stack_bytes, 4096, PROT_NONE);
    return {static_cast<char*>(p), count};
  }
  void give(char* p, std::size_t count) {
    __asan_unpoison_memory_region(p, count * stack_bytes);
    std::lock_guard<std::mutex> hold(lock);
    free_sets.emplace(count, p);
  }
  void release() {
    std::lock_guard<std::mutex> hold(lock);
    for (const auto& [count, p] : free_sets) munmap(p, count * stack_bytes);
    free_sets.clear();
  }
};
StackPool& stack_pool() {
  static StackPool* pool = new StackPool;  // outlives every static destructor
  return *pool;
}

}  // namespace

// ------------------------------------------------------------------------------------------------ what primitives call
void fault(Site site, const char* format, ...) {
  char text[512];
  va_list list;
  va_start(list, format);
  std::vsnprintf(text, sizeof text, format, list);
  va_end(list);
  Group* g = group;
  g->message = std::string(site.file) + ":" + std::to_string(site.line) + ": " + text + ", by " + describe(*g->current);
  hand_over();
  std::abort();  // a fiber that faulted is never resumed
}

void warp_collective(Warp kind, u32 mask, const void* in, void* out, Execute execute, u32 parameter, Site site) {
  Group* g = group;
  Fiber& f = *g->current;
  f.site = site;
  const u32 lane = f.view.thread & 31, warp = f.view.thread >> 5;
  const u32 lanes = std::min(32u, f.view.threads - warp * 32);
  if (lanes < 32 && mask == 0xffffffffu) mask = (1u << lanes) - 1;  // a block's last warp may be short
  if (!(mask >> lane & 1)) fault(site, "lane %u calls a warp collective whose mask 0x%08x leaves it out", lane, mask);
  std::vector<Meeting>& meetings = f.block->meetings[warp];
  Meeting* meeting = nullptr;
  // Meetings of other masks may go on beside this one; one that can never complete ends in the deadlock report.
  for (Meeting& m : meetings)
    if (m.mask == mask) {
      if (m.kind != kind || m.parameter != parameter || m.site.line != site.line || std::strcmp(m.site.file, site.file))
        fault(site, "divergent collective: lane %u (mask 0x%08x) arrives here while others of warp %u wait at %s:%d", lane, mask, warp, m.site.file, m.site.line);
      meeting = &m;
    }
  if (!meeting) {
    for (u32 l = 0; l < lanes; l++)
      if (mask >> l & 1 && f.block->fibers[warp * 32 + l].state == State::done)
        fault(site, "divergent collective: lane %u of warp %u has exited, and mask 0x%08x waits for it", l, warp, mask);
    meetings.push_back(Meeting{kind, mask, 0, parameter, site, {}, {}});
    meeting = &meetings.back();
  }
  meeting->in[lane] = in;
  meeting->out[lane] = out;
  meeting->arrived |= 1u << lane;
  if (meeting->arrived != mask) {
    f.state = State::warp;
    hand_over();
    return;
  }
  if (execute) execute(meeting->in, meeting->out, mask, parameter);
  for (u32 l = 0; l < lanes; l++)
    if (l != lane && mask >> l & 1) g->release(f.block->fibers[warp * 32 + l]);
  *meeting = meetings.back();
  meetings.pop_back();
  // The last to arrive has no head start over the others.
  if (g->config.order) {
    g->release(f);
    hand_over();
  }
}

void block_barrier(u32 id, u32 threads, bool wait, Site site) {
  Group* g = group;
  Fiber& f = *g->current;
  f.site = site;
  Block& b = *f.block;
  if (id > 15 || (id && (threads == 0 || threads % 32 || threads > f.view.threads))) fault(site, "barrier %u among %u threads: ids are 1 to 15, threads a multiple of 32", id, threads);
  NamedBarrier& barrier = b.barriers[id];
  const u32 expected = id ? threads : b.alive;
  if (id && barrier.arrived && barrier.expected != threads) fault(site, "barrier %u is called for %u threads here and for %u elsewhere", id, threads, barrier.expected);
  barrier.expected = threads;
  if (++barrier.arrived == expected) {
    barrier.arrived = 0;
    for (Fiber& x : b.fibers)
      if (x.state == State::block_barrier && x.wait_id == id) g->release(x);
    if (g->config.order && wait) {
      g->release(f);
      hand_over();
    }
    return;
  }
  if (!wait) return;
  f.state = State::block_barrier;
  f.wait_id = id;
  hand_over();
}

void thread_copy(u8* to, const void* from, u32 bytes, u32 valid, Site site) {
  Group* g = group;
  Fiber& f = *g->current;
  f.site = site;
  if (valid > bytes) fault(site, "cp.async of %u valid bytes out of %u", valid, bytes);
  check_destination(f, to, bytes, "cp.async", site);
  const Copy copy{to, from, bytes, valid, nullptr, f.group};
  if (g->lands_now()) return land(copy);
  take_off(copy);
  f.copies.push_back(copy);
}

void thread_copy_commit() { group->current->group++; }

void thread_copy_wait(u32 pending) {
  Fiber& f = *group->current;
  std::size_t kept = 0;
  for (const Copy& copy : f.copies) {
    if (copy.group + pending < f.group)
      land(copy);
    else
      f.copies[kept++] = copy;
  }
  f.copies.resize(kept);
}

void transaction_init(u8* barrier, u32 arrivals, Site site) {
  const Fiber& f = *group->current;
  if (arrivals == 0 || arrivals >= 1u << 15) fault(site, "a barrier for %u arrivals", arrivals);
  if (barrier < f.block->shared || barrier + 8 > f.block->shared + group->config.shared_bytes || (barrier - f.block->shared) % 8)
    fault(site, "a barrier at shared offset %lld: it needs 8 aligned bytes of the block's", static_cast<long long>(barrier - f.block->shared));
  const Transaction t{0, arrivals & 0x7fff, arrivals & 0x7fff, 0, 0};
  std::memcpy(barrier, &t, 8);
}

void transaction_arrive(u8* barrier, u32 expected_bytes, Site site) {
  group->current->site = site;
  Transaction t = load_transaction(barrier, site);
  if (t.pending == 0) fault(site, "more arrivals than the barrier expects");
  t.bytes += static_cast<i32>(expected_bytes);
  t.pending--;
  store_transaction(barrier, t);
}

bool transaction_test(u8* barrier, u32 parity, Site site) {
  if (load_transaction(barrier, site).phase != (parity & 1)) return true;
  spin_pause(site);
  return false;
}

void transaction_wait(u8* barrier, u32 parity, Site site) {
  Fiber& f = *group->current;
  f.site = site;
  if (load_transaction(barrier, site).phase != (parity & 1)) return;
  f.state = State::transaction;
  f.wait_barrier = barrier;
  f.wait_parity = parity & 1;
  hand_over();
}

void transaction_copy(u8* to, const void* from, u32 bytes, u8* barrier, Site site) {
  Group* g = group;
  Fiber& f = *g->current;
  f.site = site;
  if (bytes == 0 || bytes % 16 || (to - f.block->shared) % 16 || reinterpret_cast<std::uintptr_t>(from) % 16)
    fault(site, "bulk copy of %u bytes from %p to shared offset %lld: all must be multiples of 16", bytes, from, static_cast<long long>(to - f.block->shared));
  check_destination(f, to, bytes, "a bulk copy", site);
  load_transaction(barrier, site);
  const Copy copy{to, from, bytes, bytes, barrier, 0};
  if (g->lands_now()) return land_bulk(copy);
  take_off(copy);
  g->copies.push_back(copy);
}

void moved() { group->progress++; }

void spin_pause(Site site) {
  Group* g = group;
  g->current->site = site;
  // Whoever spins waits for others: they, and copies in flight, go first.
  if (g->ready.size() == g->first_ready) g->land_one(true);
  if (g->progress != g->spun_at) g->spun_at = g->progress, g->spins = 0;
  // Nothing of this group moves any more: only another block, on another OS thread, can end the wait.
  if (++g->spins == 10000) g->sleepers.someone_moved();
  if (g->spins > 10000 && !g->sleepers.sleep(g->worker)) fault(site, "waits forever: nothing else moves");
  g->ready.insert(g->ready.begin() + static_cast<std::ptrdiff_t>(g->config.order == 1 ? g->first_ready : g->ready.size()), g->current);
  hand_over();
}

int run_grid(void (*body)(void* const*), void* const* args, const LaunchConfig& config, const RedZone* zones, char* message, std::size_t message_bytes) {
  const u64 total = static_cast<u64>(config.grid[0]) * config.grid[1] * config.grid[2];
  if (total == 0) return 0;
  std::string trouble;
  if (config.block == 0 || config.block > 1024 || total > 0x7fffffffu) trouble = "a launch needs 1 to 1024 threads a block and fewer than 2^31 blocks";
  const u32 count = static_cast<u32>(total), per_group = config.cooperative ? count : 1;
  if (config.cooperative && total * config.block > 65536) trouble = "a cooperative launch on the host holds at most 65536 threads";
  std::vector<u32> order(trouble.empty() ? count : 0);
  for (u32 i = 0; i < order.size(); i++) order[i] = config.order == 1 ? count - 1 - i : i;
  Random random{config.seed};
  if (config.order == 2)
    for (u32 i = static_cast<u32>(order.size()); i > 1; i--) std::swap(order[i - 1], order[random.below(i)]);

  std::atomic<u32> next{0};
  std::atomic<bool> stop{!trouble.empty()};
  std::mutex lock;
  const u32 cores = config.threads ? config.threads : std::max(1u, std::thread::hardware_concurrency());
  const u32 workers = std::max(1u, std::min(cores, count / per_group));
  Sleepers sleepers(workers);
  auto work = [&](u32 worker) {
    SignalStack signal_stack;
    const auto [stacks, held] = stack_pool().take(static_cast<std::size_t>(per_group) * config.block);
    while (!stop) {
      const u32 at = next.fetch_add(per_group);
      if (at >= count) break;
      Group g(sleepers, worker, config, zones, body, args, config.seed ^ (0x9e3779b97f4a7c15ull * (at + 1)));
      if (stacks)
        g.run(std::vector<u32>(order.begin() + at, order.begin() + at + per_group), stacks);
      else
        g.message = "no memory for fiber stacks";
      if (!g.message.empty()) {
        std::lock_guard<std::mutex> hold(lock);
        if (trouble.empty()) trouble = g.message;
        stop = true;
      }
    }
    if (stacks) stack_pool().give(stacks, held);
    sleepers.leave(worker);
  };
  if (!stop) {
    CrashGuard crash_guard;
    std::vector<std::thread> others;
    for (u32 i = 1; i < workers; i++) others.emplace_back(work, i);
    work(0);
    for (std::thread& t : others) t.join();
  }
  if (trouble.empty()) return 0;
  std::snprintf(message, message_bytes, "%s", trouble.c_str());
  return 1;
}

}  // namespace kd

// Gives back the stacks that are kept between launches: with their guard pages they are thousands of mappings, of which a process may have 65,530.
extern "C" void kdgen_release() { kd::stack_pool().release(); }

extern "C" void kdgen_poison(void* p, unsigned long bytes, int on) {
  if (on)
    __asan_poison_memory_region(p, bytes);
  else
    __asan_unpoison_memory_region(p, bytes);
}
