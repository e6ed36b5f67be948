/* Includes every kernel: compiled with -DISA=... and, for bfloat16, -DRAYDIX_BF16. */
#include "attention.c"
#include "attention_cascade.c"
#include "attention_decode.c"
#include "attention_extend.c"
#include "blocks.c"
#include "decoder.c"
#include "delta_net.c"
#include "delta_prompt.c"
#include "experts.c"
#include "gemm.c"
#include "pack.c"
#include "panel.c"
#include "panel_amx.c"
#include "panel_widened.c"
#include "quant.c"
#ifndef RAYDIX_BF16
#include "sample.c" /* Logits are float32 in models of any type. */
#endif
