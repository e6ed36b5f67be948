/* Detects the instruction sets of this processor. Compiled once, without special instruction sets. */
#include "raydix.h"

#if defined(__linux__) && defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Whether AMX tiles can be used. They are 8 KB of registers, which Linux saves only for processes that asked for it. */
static bool has_tiles(void)
{
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & (1u << 22)) || !(d & (1u << 24)))
        return false;
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

/* Older compilers have no __builtin_cpu_supports for it. */
static bool has_avx512_bf16(void)
{
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & (1u << 5));
}
#endif

EXPORT int raydix_abi(void) { return RAYDIX_ABI; }

/* Return the best instruction set of this processor and system: generic, avx2, avx512, avx512_bf16 or amx. */
EXPORT const char *raydix_best_isa(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#if defined(__linux__)
    if (avx512 && has_avx512_bf16())
        return has_tiles() ? "amx" : "avx512_bf16";
#endif
    return avx512 ? "avx512" : avx2 ? "avx2" : "generic";
#else
    return "generic";
#endif
}
