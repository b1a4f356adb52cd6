// Which instruction set runs: what the processor has and the operating system saves, or the one that
// the environment variable CLEARHEAD_ISA names.
#include <stdlib.h>
#include <string.h>

#include "kernel.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace clearhead {
namespace {

#if defined(__x86_64__)

// Register states that the operating system saves, a bit each (Intel SDM volume 1, 13.1).
constexpr uint64_t AVX_STATE = 0x06;     // XMM, YMM
constexpr uint64_t AVX512_STATE = 0xe6;  // these, masks, upper halves of ZMM, ZMM16 to ZMM31

uint64_t saved_states() {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return 0;
  uint32_t low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t(high) << 32 | low;
}

bool has_avx2() {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return false;
  if (!(c & bit_FMA) || !(c & bit_F16C) || !(c & bit_AVX)) return false;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & bit_AVX2)) return false;
  return (saved_states() & AVX_STATE) == AVX_STATE;
}

bool has_avx512() {
  unsigned a, b, c, d;
  if (!has_avx2() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const unsigned needed = bit_AVX512F | bit_AVX512DQ | bit_AVX512BW | bit_AVX512VL;
  return (b & needed) == needed && (saved_states() & AVX512_STATE) == AVX512_STATE;
}

bool has_avx512bf16() {
  unsigned a, b, c, d;
  return has_avx512() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & bit_AVX512BF16);
}

// The system lets a process use tiles when it asks, once, and then all of its threads.
bool has_amx() {
#if defined(__linux__)
  constexpr uint64_t TILES_STATE = 0x60000;  // their shapes and their data, bits 17 and 18
  constexpr long REQUEST = 0x1023, TILES_DATA = 18;  // ARCH_REQ_XCOMP_PERM of arch_prctl
  constexpr unsigned needed = 1u << 22 | 1u << 24;  // AMX-BF16, AMX-TILE
  unsigned a, b, c, d;
  return has_avx512() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & needed) == needed &&
         (saved_states() & TILES_STATE) == TILES_STATE &&
         syscall(SYS_arch_prctl, REQUEST, TILES_DATA) == 0;
#else
  return false;
#endif
}

// A core of an EPYC of Zen 4 does 234 GF/s in dpbf16 and 117 in float32 (2026-11). On a Xeon calls by
// pairs took 1.5 to 1.8 times as long as widened ones (2026-12).
bool is_amd() {
  unsigned a, b, c, d;
  return __get_cpuid(0, &a, &b, &c, &d) && b == signature_AMD_ebx;
}

#endif

bool always() { return true; }

struct Entry {
  const Kernel *kernel;
  bool (*supported)();
  bool (*preferred)();  // whether it is taken without being named
};

// From the best to the one that runs anywhere.
const Entry entries[] = {
#if defined(__x86_64__)
    {&amx_kernel, has_amx, always},
    {&avx512bf16_kernel, has_avx512bf16, is_amd},
    {&avx512_kernel, has_avx512, always},
    {&avx2_kernel, has_avx2, always},
#elif defined(__aarch64__)
    {&neon_kernel, always, always},  // every AArch64 processor has it
#endif
    {&generic_kernel, always, always},
};

struct Choice {
  const Kernel *kernel;
  int32_t status;
};

Choice choose() {
  const char *wanted = getenv("CLEARHEAD_ISA");
  if (wanted && !*wanted) wanted = nullptr;
  for (const Entry &entry : entries) {
    if (wanted && strcmp(wanted, entry.kernel->name) != 0) continue;
    if (!wanted && !entry.preferred()) continue;
    if (entry.supported()) return {entry.kernel, CLEARHEAD_OK};
    if (wanted) return {nullptr, CLEARHEAD_UNSUPPORTED_ISA};
  }
  return {nullptr, CLEARHEAD_UNKNOWN_ISA};
}

}  // namespace

const Kernel *active_kernel(int64_t dtype, int32_t *status) {
  static const Choice choice = choose();
  *status = choice.status;
  const bool wide = choice.kernel && choice.kernel->wide && dtype != CLEARHEAD_BFLOAT16;
  return wide ? choice.kernel->wide : choice.kernel;
}

}  // namespace clearhead
