// Switching between a fiber and its scheduler: hand-written for x86-64 and aarch64, ucontext elsewhere. In sanitizer builds
// every switch is announced to AddressSanitizer.
#pragma once

#ifdef KD_ASAN
#define KD_STACK_BYTES (512 * 1024)
#else
#define KD_STACK_BYTES (128 * 1024)
#endif

#if !defined(__x86_64__) && !defined(__aarch64__)
#define KD_UCONTEXT 1
#include <ucontext.h>
#endif

namespace kd {

struct Context {
#ifdef KD_UCONTEXT
  ucontext_t state;
#else
  void* top = nullptr;  // saved stack pointer
#endif
#ifdef KD_ASAN
  void* fake_stack = nullptr;
  const void* bottom = nullptr;
  std::size_t size = 0;
#endif
};

#ifndef KD_UCONTEXT
// Saves the callee-saved registers and the stack pointer in *from, and continues where `to` was saved.
extern "C" void kd_switch(void** from, void* to);
#if defined(__x86_64__)
__asm__(R"(
  .text
  .type kd_switch,@function
  .local kd_switch
kd_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
  .size kd_switch, .-kd_switch
)");
#else
__asm__(R"(
  .text
  .type kd_switch,%function
  .local kd_switch
kd_switch:
  stp x19, x20, [sp, #-160]!
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  ldp x19, x20, [sp], #160
  ret
  .size kd_switch, .-kd_switch
)");
#endif
#endif

inline void switch_raw(Context& from, Context& to) {
#ifdef KD_UCONTEXT
  swapcontext(&from.state, &to.state);
#else
  kd_switch(&from.top, to.top);
#endif
}

inline void switch_context(Context& from, Context& to) {
#ifdef KD_ASAN
  __sanitizer_start_switch_fiber(&from.fake_stack, to.bottom, to.size);
  switch_raw(from, to);
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#else
  switch_raw(from, to);
#endif
}

// First thing on a new fiber; `resumer` is where it was started from.
inline void enter_context(Context& mine, Context& resumer) {
#ifdef KD_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &resumer.bottom, &resumer.size);
#endif
  (void)mine, (void)resumer;
}

// Last thing on a fiber: never returns.
[[noreturn]] inline void leave_context(Context& from, Context& to) {
#ifdef KD_ASAN
  __sanitizer_start_switch_fiber(nullptr, to.bottom, to.size);
#endif
  switch_raw(from, to);
  __builtin_trap();
}

// Prepares a fiber on a stack whose lowest page is a guard. Tops are staggered: equally aligned stacks would compete for the
// same few cache sets (59 against 25 ns a switch, measured).
inline void make_context(Context& context, char* stack, std::size_t bytes, u32 number, void (*entry)()) {
  char* top = stack + bytes - number % 48 * 320;
#ifdef KD_ASAN
  context.bottom = stack + 4096;
  context.size = static_cast<std::size_t>(top - (stack + 4096));
  __asan_unpoison_memory_region(stack + 4096, bytes - 4096);
#endif
#ifdef KD_UCONTEXT
  getcontext(&context.state);
  context.state.uc_stack.ss_sp = stack + 4096;
  context.state.uc_stack.ss_size = static_cast<std::size_t>(top - (stack + 4096));
  context.state.uc_link = nullptr;
  makecontext(&context.state, entry, 0);
#elif defined(__x86_64__)
  void** slot = reinterpret_cast<void**>(reinterpret_cast<std::uintptr_t>(top) & ~std::uintptr_t{63});
  *--slot = nullptr;  // the entry's return address: never used
  *--slot = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; i++) *--slot = nullptr;
  context.top = slot;
#else
  void** slot = reinterpret_cast<void**>(reinterpret_cast<std::uintptr_t>(top) & ~std::uintptr_t{63}) - 20;
  for (int i = 0; i < 20; i++) slot[i] = nullptr;
  slot[11] = reinterpret_cast<void*>(entry);  // x30
  context.top = slot;
#endif
}

}  // namespace kd
