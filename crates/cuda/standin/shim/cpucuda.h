// CPU execution shim for CUDA C++ kernels. Needs no header of the toolkit: what kernels use of it is defined here.
// A .cu file compiled with this header as ordinary C++17 becomes a shared object whose
// kernels run one block at a time on fibers: every CUDA thread is a fiber, barriers and
// warp collectives are rendezvous points, and a scheduler that may visit the fibers in
// forward, reverse or shuffled order exposes missing barriers.
#pragma once
#define CPUCUDA 1
#include <algorithm>
#include <csetjmp>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <tuple>
#include <utility>
#include <vector>
#include <cmath>
#include <sys/mman.h>


struct uint3 { unsigned x, y, z; };
struct dim3 { unsigned x, y, z; dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {} };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __align__(n) alignas(n)
#define __restrict__ __restrict
#define __shared__ static thread_local
#define __constant__ static
#define __launch_bounds__(...)
#define __grid_constant__
#define DEVICE inline

namespace cpucuda {

constexpr int kOk = 0, kIllegalAddress = 700, kMisaligned = 716, kLaunchFailed = 719;
constexpr size_t kStack = 64 * 1024;
constexpr size_t kSlot = 64;  // bytes one lane may contribute to a warp collective

#if !defined(__x86_64__)
#error "only the context switch of x86-64 is written"
#endif
extern "C" void cpucuda_switch(void** save_sp, void* load_sp);
// Saves callee-saved registers on the current stack, then adopts the other stack.
asm(R"(
.text
.local cpucuda_switch
.type cpucuda_switch,@function
cpucuda_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size cpucuda_switch, .-cpucuda_switch
)");

struct Meet {            // one rendezvous: a block barrier or a warp collective for one mask
  unsigned mask = 0;     // 0 = free entry (warp collectives only)
  int arrived = 0;
  unsigned epoch = 0;
  alignas(16) unsigned char slot[2][32][kSlot];
};
struct Barrier { int arrived = 0; unsigned epoch = 0; int red[2] = {0, 0}; };

struct PendingCopy { void* dst; const void* src; unsigned n; int group; };

struct Fiber {
  void* sp = nullptr;
  uint3 tid{};
  int lane = 0, warp = 0;
  bool done = false;
  const unsigned* wait_on = nullptr;  // runnable again once *wait_on != wait_val
  unsigned wait_val = 0;
  std::vector<PendingCopy> pending;   // cp.async not yet waited for
  int groups = 0;                     // cp.async groups committed
};

struct Warp { unsigned alive = 0; Meet meet[8]; };

struct Block {
  dim3 grid, block;
  uint3 bid{};
  int n = 0, alive = 0;
  std::vector<Fiber> fib;
  std::vector<Warp> warps;
  Barrier bar;
  unsigned char* dyn = nullptr;   // ends at an inaccessible page
  size_t dyn_len = 0;
  void* sched_sp = nullptr;
  void (*body)(void**) = nullptr;
  void** params = nullptr;
  char* stacks = nullptr;
};

inline thread_local Block* B = nullptr;
inline thread_local Fiber* F = nullptr;
inline thread_local sigjmp_buf* trap = nullptr;
inline thread_local const char* kernel_name = "";

inline void yield() { cpucuda_switch(&F->sp, B->sched_sp); }
inline void wait(const unsigned* w, unsigned v) {
  F->wait_on = w; F->wait_val = v;
  while (*w == v) yield();
  F->wait_on = nullptr;
}

inline void release_if_full() {
  Block* b = B;
  if (b->alive > 0 && b->bar.arrived == b->alive) {
    b->bar.arrived = 0; b->bar.epoch++; b->bar.red[b->bar.epoch & 1] = 0;
  }
}
inline int barrier(int pred = 0) {
  Block* b = B;
  unsigned e = b->bar.epoch;
  b->bar.red[e & 1] += pred != 0;
  b->bar.arrived++;
  release_if_full();
  if (b->bar.epoch == e) wait(&b->bar.epoch, e);
  return b->bar.red[e & 1];
}

// Every lane of `mask` deposits `in`; the last to arrive may transform the table of deposits,
// which is then returned to all of them.
template <class Done> inline unsigned char (*collective(unsigned mask, const void* in, size_t n, Done done))[kSlot] {
  Warp& w = B->warps[F->warp];
  unsigned live = mask & w.alive;
  if (!(live >> F->lane & 1)) { fprintf(stderr, "cpucuda: %s: lane %d not in its own mask\n", kernel_name, F->lane); abort(); }
  Meet* m = nullptr;
  for (auto& x : w.meet) if (x.mask == mask) { m = &x; break; }
  if (!m) for (auto& x : w.meet) if (x.mask == 0) { m = &x; m->mask = mask; break; }
  if (!m) { fprintf(stderr, "cpucuda: too many divergent masks\n"); abort(); }
  unsigned e = m->epoch;
  memcpy(m->slot[e & 1][F->lane], in, n);
  if (++m->arrived == __builtin_popcount(live)) { done(m->slot[e & 1]); m->arrived = 0; m->epoch++; }
  else wait(&m->epoch, e);
  return m->slot[e & 1];
}
inline unsigned char (*collective(unsigned mask, const void* in, size_t n))[kSlot] {
  return collective(mask, in, n, [](auto) {});
}
template <class T> inline T shfl(unsigned mask, T v, int src, bool ok) {
  static_assert(sizeof(T) <= kSlot, "");
  auto* t = collective(mask, &v, sizeof(T));
  T r = v;
  if (ok && (mask >> src & 1)) memcpy(&r, t[src], sizeof(T));
  return r;
}

[[noreturn]] inline void fiber_main() {
  B->body(B->params);
  Fiber* f = F;
  f->done = true;
  B->alive--;
  B->warps[f->warp].alive &= ~(1u << f->lane);
  release_if_full();
  yield();
  __builtin_unreachable();
}

inline void on_fault(int sig, siginfo_t* si, void*) {
  if (!trap) { signal(sig, SIG_DFL); return; }
  fprintf(stderr, "cpucuda: %s at %p in kernel %s block (%u,%u,%u) thread (%u,%u,%u)\n",
          sig == SIGILL ? "misaligned access" : "illegal address", si->si_addr,
          kernel_name, B->bid.x, B->bid.y, B->bid.z, F->tid.x, F->tid.y, F->tid.z);
  siglongjmp(*trap, sig == SIGILL ? kMisaligned : kIllegalAddress);
}

enum Order { Fwd, Rev, Rnd };
inline Order order() {
  const char* s = getenv("CPUCUDA_ORDER");
  return !s ? Fwd : !strcmp(s, "rev") ? Rev : !strcmp(s, "rand") ? Rnd : Fwd;
}

// cp.async may land at once or only at the wait; a kernel must be right either way.
inline bool copies_early() { static bool v = getenv("CPUCUDA_ASYNC") && !strcmp(getenv("CPUCUDA_ASYNC"), "early"); return v; }

inline int run_block(Block& b, Order ord, unsigned& rng) {
  b.alive = b.n;
  b.bar = Barrier{};
  for (auto& w : b.warps) { w.alive = 0; for (auto& m : w.meet) { m.mask = 0; m.arrived = 0; } }
  if (b.dyn_len) memset(b.dyn, 0xff, b.dyn_len);  // poison: NaN
  for (int i = 0; i < b.n; i++) {
    Fiber& f = b.fib[i];
    f.tid = {i % b.block.x, i / b.block.x % b.block.y, i / (b.block.x * b.block.y)};
    f.lane = i & 31; f.warp = i >> 5; f.done = false; f.wait_on = nullptr; f.groups = 0; f.pending.clear();
    b.warps[f.warp].alive |= 1u << f.lane;
    void** sp = (void**)(b.stacks + (size_t)(i + 1) * kStack);
    *--sp = nullptr;               // keeps the stack 16-byte aligned at fiber_main's entry
    *--sp = (void*)&fiber_main;
    for (int r = 0; r < 6; r++) *--sp = nullptr;
    f.sp = sp;
  }
  auto step_fiber = [&](int i) {
    Fiber& f = b.fib[i];
    if (f.done || (f.wait_on && *f.wait_on == f.wait_val)) return false;
    F = &f;
    cpucuda_switch(&b.sched_sp, f.sp);
    return true;
  };
  const int nw = (int)b.warps.size();
  while (b.alive > 0) {
    bool moved = false;
    if (ord == Rnd) {  // shuffled threads, one step each
      rng = rng * 1664525u + 1013904223u;
      unsigned start = rng % b.n, step = (rng >> 8) % b.n | 1;
      while (std::gcd((unsigned)b.n, step) != 1) step += 2;
      for (int k = 0; k < b.n; k++) moved |= step_fiber((int)((start + (uint64_t)k * step) % b.n));
    } else {           // one warp runs as far as it can before the next one starts
      for (int w = 0; w < nw; w++) {
        int wi = ord == Rev ? nw - 1 - w : w, lo = wi * 32, n = std::min(32, b.n - lo);
        for (bool again = true; again;) {
          again = false;
          for (int k = 0; k < n; k++) again |= step_fiber(lo + (ord == Rev ? n - 1 - k : k));
          moved |= again;
        }
      }
    }
    if (!moved) {
      fprintf(stderr, "cpucuda: kernel %s block (%u,%u,%u): deadlock, %d of %d live threads at the block barrier\n",
              kernel_name, b.bid.x, b.bid.y, b.bid.z, b.bar.arrived, b.alive);
      return kLaunchFailed;
    }
  }
  return kOk;
}

inline int run_grid(const char* name, void (*body)(void**), void** params, const unsigned g[3], const unsigned t[3], size_t dyn) {
  static bool hooked = [] {
    struct sigaction sa{};
    sa.sa_sigaction = on_fault; sa.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGSEGV, &sa, nullptr); sigaction(SIGBUS, &sa, nullptr);
    sigaction(SIGILL, &sa, nullptr);  // -fsanitize=alignment traps with it
    return true;
  }();
  (void)hooked;
  Block b;
  b.grid = dim3(g[0], g[1], g[2]); b.block = dim3(t[0], t[1], t[2]);
  b.n = t[0] * t[1] * t[2];
  b.fib.resize(b.n); b.warps.resize((b.n + 31) / 32);
  constexpr size_t kPage = 4096;
  b.dyn_len = (dyn + 15) & ~(size_t)15;
  size_t room = (b.dyn_len + kPage - 1) / kPage * kPage;
  char* dyn_map = (char*)mmap(nullptr, room + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  mprotect(dyn_map + room, kPage, PROT_NONE);
  b.dyn = (unsigned char*)dyn_map + room - b.dyn_len;
  b.body = body; b.params = params;
  b.stacks = (char*)mmap(nullptr, kStack * b.n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  B = &b; kernel_name = name;
  sigjmp_buf jb; int rc = kOk; unsigned rng = 12345; Order ord = order();
  if (int fault = sigsetjmp(jb, 1)) rc = fault;
  else {
    trap = &jb;
    for (unsigned z = 0; z < g[2] && !rc; z++)
      for (unsigned y = 0; y < g[1] && !rc; y++)
        for (unsigned x = 0; x < g[0] && !rc; x++) { b.bid = {x, y, z}; rc = run_block(b, ord, rng); }
  }
  trap = nullptr; B = nullptr; F = nullptr;
  munmap(b.stacks, kStack * b.n);
  munmap(dyn_map, room + kPage);
  return rc;
}

// Module ABI the stand-in driver looks up: one record per kernel, symbol cpucuda_kernel_<name>.
struct KernelRecord { int nparams; int max_threads; const unsigned* sizes; int (*run)(void**, const unsigned*, const unsigned*, size_t); };
template <auto K> struct Entry;
template <class... A, void (*K)(A...)> struct Entry<K> {
  static constexpr unsigned sizes[sizeof...(A) + 1] = {sizeof(A)..., 0};
  static constexpr int n = sizeof...(A);
  template <size_t... I> static void call(void** p, std::index_sequence<I...>) { K(*(std::remove_reference_t<A>*)p[I]...); }
  static void body(void** p) { call(p, std::index_sequence_for<A...>{}); }
};
#define DEFINE_KERNEL(name, max_threads, run_body, Args)                                                       \
  static void name(const Args args) { run_body(args); }                                                        \
  static int cpucuda_run_##name(void** p, const unsigned* g, const unsigned* b, size_t s) {               \
    return cpucuda::run_grid(#name, &cpucuda::Entry<&name>::body, p, g, b, s);                             \
  }                                                                                                       \
  extern "C" __attribute__((visibility("default"))) const cpucuda::KernelRecord cpucuda_kernel_##name = { \
      cpucuda::Entry<&name>::n, max_threads, cpucuda::Entry<&name>::sizes, &cpucuda_run_##name};

inline void* dyn_smem() { return B->dyn; }
}  // namespace cpucuda

// ---- what kernels see ----
#define threadIdx (cpucuda::F->tid)
#define blockIdx (cpucuda::B->bid)
#define blockDim (cpucuda::B->block)
#define gridDim (cpucuda::B->grid)
#define warpSize 32
inline void __syncthreads() { cpucuda::barrier(); }
inline int __syncthreads_or(int p) { return cpucuda::barrier(p) != 0; }
inline void __syncwarp(unsigned m = 0xffffffffu) { char c = 0; cpucuda::collective(m, &c, 1); }
inline void __threadfence() {}
template <class T> T __shfl_sync(unsigned m, T v, int src, int w = 32) {
  int base = cpucuda::F->lane & ~(w - 1); return cpucuda::shfl(m, v, base + (src & (w - 1)), true);
}
template <class T> T __shfl_xor_sync(unsigned m, T v, int x, int w = 32) {
  int l = cpucuda::F->lane, s = l ^ x; return cpucuda::shfl(m, v, s & 31, (s & ~(w - 1)) <= (l & ~(w - 1)));
}
template <class T> T __shfl_down_sync(unsigned m, T v, unsigned d, int w = 32) {
  int l = cpucuda::F->lane; bool ok = (l & (w - 1)) + (int)d < w; return cpucuda::shfl(m, v, ok ? l + d : l, ok);
}
template <class T> T __shfl_up_sync(unsigned m, T v, unsigned d, int w = 32) {
  int l = cpucuda::F->lane; bool ok = (l & (w - 1)) >= (int)d; return cpucuda::shfl(m, v, ok ? l - d : l, ok);
}
inline unsigned __ballot_sync(unsigned m, int p) {
  char c = p != 0; auto* t = cpucuda::collective(m, &c, 1); unsigned r = 0;
  for (int i = 0; i < 32; i++) if (m >> i & 1) r |= (unsigned)t[i][0] << i;
  return r & m;
}
inline int __any_sync(unsigned m, int p) { return __ballot_sync(m, p) != 0; }
template <class T> T atomicAdd(T* p, T v) {
  T o = *p, n; do { n = o + v; } while (!__atomic_compare_exchange(p, &o, &n, true, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)); return o;
}
template <class T> T __ldg(const T* p) { return *p; }
inline float __expf(float x) { return expf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
template <class T> T min(T a, T b) { return a < b ? a : b; }
template <class T> T max(T a, T b) { return a > b ? a : b; }

inline int __all_sync(unsigned m, int p) { return __ballot_sync(m, p) == m; }
template <class T> T atomicOp(T* p, T v, T (*f)(T, T)) { T o = *p, n; do { n = f(o, v); } while (!__atomic_compare_exchange(p, &o, &n, true, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)); return o; }
inline unsigned atomicOr(unsigned* p, unsigned v) { return __atomic_fetch_or(p, v, __ATOMIC_SEQ_CST); }
inline int atomicOr(int* p, int v) { return __atomic_fetch_or(p, v, __ATOMIC_SEQ_CST); }
inline int atomicMax(int* p, int v) { return atomicOp<int>(p, v, [](int a, int b) { return a > b ? a : b; }); }
inline int atomicExch(int* p, int v) { return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST); }
inline int atomicCAS(int* p, int e, int v) { __atomic_compare_exchange_n(p, &e, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); return e; }
inline unsigned __float_as_uint(float x) { unsigned u; memcpy(&u, &x, 4); return u; }
inline float __uint_as_float(unsigned u) { float x; memcpy(&x, &u, 4); return x; }
inline int __float_as_int(float x) { int u; memcpy(&u, &x, 4); return u; }
inline float __int_as_float(int u) { float x; memcpy(&x, &u, 4); return x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float sinpif(float x) { return (float)sin(M_PI * (double)x); }
inline float cospif(float x) { return (float)cos(M_PI * (double)x); }
inline float fast_exp2(float x) { return exp2f(x); }
inline float fast_rcp(float x) { return 1.0f / x; }
inline float __saturatef(float x) { return x < 0 ? 0 : x > 1 ? 1 : x; }
inline void __trap() { siglongjmp(*cpucuda::trap, cpucuda::kLaunchFailed); }
inline float f16_to_f32(unsigned short b) { _Float16 h; memcpy(&h, &b, 2); return (float)h; }
inline unsigned short f32_to_f16(float x) { _Float16 h = (_Float16)x; unsigned short b; memcpy(&b, &h, 2); return b; }
inline unsigned short f32_to_bf16(float x) {
  unsigned u = __float_as_uint(x);
  if (x != x) return (unsigned short)(u >> 16 | 0x40);
  return (unsigned short)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
#define DYN_SHARED(T, name) T* name = (T*)cpucuda::dyn_smem()
inline void cp_check(const void* p) { if ((uintptr_t)p & 15) { raise(SIGILL); } }
inline void cp_async16(void* smem, const void* gmem) {
  cp_check(smem); cp_check(gmem);
  if (cpucuda::copies_early()) { memcpy(smem, gmem, 16); return; }
  auto* f = cpucuda::F; f->pending.push_back({smem, gmem, 16, f->groups});
}
alignas(16) inline const unsigned char cp_zeros[16] = {};
inline const void* cp_zeros_aligned() { return cp_zeros; }
inline void cp_async16_if(void* smem, const void* gmem, bool valid) { cp_async16(smem, valid ? gmem : (const void*)((uintptr_t)cp_zeros_aligned())); }
inline void cp_async_commit() { cpucuda::F->groups++; }
template <int N> inline void cp_async_wait() {
  auto* f = cpucuda::F; size_t k = 0;
  for (auto& c : f->pending) { if (c.group < f->groups - N) memcpy(c.dst, c.src, c.n); else f->pending[k++] = c; }
  f->pending.resize(k);
}
// D(16x8,f32) += A(16x16,bf16,row) * B(16x8,bf16,col): register fragments as in the PTX ISA.
inline void mma_16816_bf16(float d[4], const unsigned a[4], const unsigned b[2]) {
  struct Frag { unsigned a[4], b[2]; float d[4]; } in;
  memcpy(in.a, a, 16); memcpy(in.b, b, 8); memcpy(in.d, d, 16);
  auto* t = cpucuda::collective(0xffffffffu, &in, sizeof in, [](unsigned char(*t)[cpucuda::kSlot]) {
    float A[16][16], B[16][8], D[16][8];
    auto f = [](unsigned w, int hi) { unsigned u = hi ? w & 0xffff0000u : w << 16; float x; memcpy(&x, &u, 4); return x; };
    for (int l = 0; l < 32; l++) {
      const Frag& x = *(const Frag*)t[l];
      int g = l >> 2, q = l & 3;
      for (int i = 0; i < 4; i++)
        for (int h = 0; h < 2; h++) A[g + 8 * (i & 1)][q * 2 + h + 8 * (i >> 1)] = f(x.a[i], h);
      for (int i = 0; i < 2; i++)
        for (int h = 0; h < 2; h++) B[q * 2 + h + 8 * i][g] = f(x.b[i], h);
      for (int i = 0; i < 4; i++) D[g + 8 * (i >> 1)][q * 2 + (i & 1)] = x.d[i];
    }
    for (int r = 0; r < 16; r++)
      for (int k = 0; k < 16; k++)
        for (int c = 0; c < 8; c++) D[r][c] += A[r][k] * B[k][c];
    for (int l = 0; l < 32; l++)
      for (int i = 0; i < 4; i++) ((Frag*)t[l])->d[i] = D[(l >> 2) + 8 * (i >> 1)][(l & 3) * 2 + (i & 1)];
  });
  memcpy(d, ((Frag*)t[cpucuda::F->lane])->d, 16);
}
// D(16x8,f32) += A(16x16,bf16,row) * B(16x8,bf16,col): register fragments as in the PTX ISA.
inline void mma_16816_f16(float d[4], const unsigned a[4], const unsigned b[2]) {
  struct Frag { unsigned a[4], b[2]; float d[4]; } in;
  memcpy(in.a, a, 16); memcpy(in.b, b, 8); memcpy(in.d, d, 16);
  auto* t = cpucuda::collective(0xffffffffu, &in, sizeof in, [](unsigned char(*t)[cpucuda::kSlot]) {
    float A[16][16], B[16][8], D[16][8];
    auto f = [](unsigned w, int hi) { return f16_to_f32((unsigned short)(hi ? w >> 16 : w & 0xffff)); };
    for (int l = 0; l < 32; l++) {
      const Frag& x = *(const Frag*)t[l];
      int g = l >> 2, q = l & 3;
      for (int i = 0; i < 4; i++)
        for (int h = 0; h < 2; h++) A[g + 8 * (i & 1)][q * 2 + h + 8 * (i >> 1)] = f(x.a[i], h);
      for (int i = 0; i < 2; i++)
        for (int h = 0; h < 2; h++) B[q * 2 + h + 8 * i][g] = f(x.b[i], h);
      for (int i = 0; i < 4; i++) D[g + 8 * (i >> 1)][q * 2 + (i & 1)] = x.d[i];
    }
    for (int r = 0; r < 16; r++)
      for (int k = 0; k < 16; k++)
        for (int c = 0; c < 8; c++) D[r][c] += A[r][k] * B[k][c];
    for (int l = 0; l < 32; l++)
      for (int i = 0; i < 4; i++) ((Frag*)t[l])->d[i] = D[(l >> 2) + 8 * (i >> 1)][(l & 3) * 2 + (i & 1)];
  });
  memcpy(d, ((Frag*)t[cpucuda::F->lane])->d, 16);
}

inline void ldmatrix_any(unsigned r[4], const void* row, bool trans) {
  if ((uintptr_t)row & 15) raise(SIGILL);
  auto* t = cpucuda::collective(0xffffffffu, &row, sizeof row);
  int l = cpucuda::F->lane;
  for (int m = 0; m < 4; m++) {
    unsigned short e[2];
    for (int h = 0; h < 2; h++) {
      int i = trans ? 2 * (l & 3) + h : l >> 2, k = trans ? l >> 2 : 2 * (l & 3) + h;
      const unsigned short* p; memcpy(&p, t[m * 8 + i], sizeof p);
      e[h] = p[k];
    }
    r[m] = (unsigned)e[0] | (unsigned)e[1] << 16;
  }
  __syncwarp();
}
inline void ldmatrix_x4(unsigned r[4], const void* row) { ldmatrix_any(r, row, false); }
inline void ldmatrix_x4_trans(unsigned r[4], const void* row) { ldmatrix_any(r, row, true); }
