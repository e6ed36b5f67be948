"""Numbers of published config.json files, as they are written there: what decides names and shapes of weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TEXT = {"vision_config": {"num_hidden_layers": 2}}
_HEARD = {**_TEXT, "audio_config": {"num_hidden_layers": 1}}

PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "microsoft/phi-4": {
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "hidden_size": 5120,
        "intermediate_size": 17920,
        "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 10, "vocab_size": 100352,
        "max_position_embeddings": 16384, "rope_theta": 250000, "rope_scaling": None, "tie_word_embeddings": False,
    },
    "microsoft/Phi-4-mini-instruct": {
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192,
        "num_hidden_layers": 32, "num_attention_heads": 24, "num_key_value_heads": 8, "vocab_size": 200064,
        "max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.5] * 48},
        "sliding_window": 262144, "tie_word_embeddings": True,
    },
    "ibm-granite/granite-3.3-8b-instruct": {
        "architectures": ["GraniteForCausalLM"], "model_type": "granite", "hidden_size": 4096,
        "intermediate_size": 12800, "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 49159, "max_position_embeddings": 131072, "rope_theta": 10000000.0, "rope_scaling": None,
        "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.0078125,
        "logits_scaling": 16.0, "tie_word_embeddings": True,
    },
    "allenai/OLMo-2-1124-7B": {
        "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "hidden_size": 4096,
        "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
        "vocab_size": 100352, "max_position_embeddings": 4096, "rope_theta": 500000, "tie_word_embeddings": False,
    },
    "allenai/Olmo-3-1025-7B": {
        "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "hidden_size": 4096,
        "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
        "vocab_size": 100278, "max_position_embeddings": 65536, "rope_theta": 500000, "sliding_window": 4096,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "beta_fast": 32.0,
            "beta_slow": 1.0, "attention_factor": 1.2079441541679836,
        },
        "tie_word_embeddings": False,
    },
    "HuggingFaceTB/SmolLM3-3B": {
        "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "hidden_size": 2048,
        "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 4,
        "vocab_size": 128256, "max_position_embeddings": 65536, "rope_theta": 5000000.0,
        "no_rope_layers": [1, 1, 1, 0] * 9, "no_rope_layer_interval": 4, "use_sliding_window": False,
    },
    "ByteDance-Seed/Seed-OSS-36B-Instruct": {
        "architectures": ["SeedOssForCausalLM"], "model_type": "seed_oss", "hidden_size": 5120,
        "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 80, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 155136, "max_position_embeddings": 524288, "rope_theta": 10000000.0,
        "attention_bias": True, "attention_out_bias": False, "tie_word_embeddings": False,
    },
    "zai-org/GLM-4.5-Air": {
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "hidden_size": 4096,
        "intermediate_size": 10944, "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 151552, "max_position_embeddings": 131072, "rope_theta": 1000000,
        "attention_bias": True, "use_qk_norm": False, "n_routed_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1,
        "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True, "tie_word_embeddings": False,
    },
    "zai-org/GLM-4.6": {
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "hidden_size": 5120,
        "intermediate_size": 12288, "num_hidden_layers": 92, "num_attention_heads": 96, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 151552, "max_position_embeddings": 202752, "rope_theta": 1000000,
        "attention_bias": True, "use_qk_norm": True, "n_routed_experts": 160, "num_experts_per_tok": 8,
        "moe_intermediate_size": 1536, "n_shared_experts": 1, "first_k_dense_replace": 3, "n_group": 1,
        "topk_group": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True, "tie_word_embeddings": False,
    },
    "Qwen/Qwen3-Next-80B-A3B-Instruct": {
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_size": 2048,
        "intermediate_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2,
        "head_dim": 256, "vocab_size": 151936, "max_position_embeddings": 262144, "rope_theta": 10000000,
        "partial_rotary_factor": 0.25, "rope_scaling": None, "attention_bias": False, "decoder_sparse_step": 1,
        "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
        "mlp_only_layers": [], "moe_intermediate_size": 512, "norm_topk_prob": True, "num_experts": 512,
        "num_experts_per_tok": 10, "shared_expert_intermediate_size": 512, "tie_word_embeddings": False,
    },
    "Qwen/Qwen3.5-35B-A3B": {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
        "tie_word_embeddings": False,
        "vision_config": {"depth": 2},
        "text_config": {
            "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40,
            "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 248320,
            "max_position_embeddings": 262144, "attn_output_gate": True, "full_attention_interval": 4,
            "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
            "linear_num_value_heads": 32, "linear_value_head_dim": 128, "moe_intermediate_size": 512,
            "num_experts": 256, "num_experts_per_tok": 8, "shared_expert_intermediate_size": 512,
            "rope_parameters": {
                "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
                "rope_theta": 10000000, "rope_type": "default",
            },
            "tie_word_embeddings": False,
        },
    },
    "Qwen/Qwen3.5-27B": {
        "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
        "tie_word_embeddings": False,
        "vision_config": {"depth": 2},
        "text_config": {
            "model_type": "qwen3_5_text", "hidden_size": 5120, "intermediate_size": 17408,
            "num_hidden_layers": 64, "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256,
            "vocab_size": 248320, "max_position_embeddings": 262144, "attn_output_gate": True,
            "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
            "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_value_head_dim": 128,
            "rope_parameters": {
                "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
                "rope_theta": 10000000, "rope_type": "default",
            },
            "tie_word_embeddings": False,
        },
    },
    "MiniMaxAI/MiniMax-M2": {
        "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "hidden_size": 3072,
        "intermediate_size": 1536, "num_hidden_layers": 62, "num_attention_heads": 48, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 200064, "max_position_embeddings": 196608, "rope_theta": 5000000,
        "rotary_dim": 64, "num_local_experts": 256, "num_experts_per_tok": 8, "tie_word_embeddings": False,
    },
    "deepseek-ai/DeepSeek-V3-0324": {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
        "intermediate_size": 18432, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128, "vocab_size": 129280, "max_position_embeddings": 163840, "rope_theta": 10000,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
        "n_shared_experts": 1, "first_k_dense_replace": 3, "moe_layer_freq": 1, "n_group": 8, "topk_group": 4,
        "routed_scaling_factor": 2.5, "norm_topk_prob": True, "scoring_func": "sigmoid",
        "topk_method": "noaux_tc", "attention_bias": False, "num_nextn_predict_layers": 1,
        "rope_scaling": {
            "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
        "tie_word_embeddings": False,
    },
    "moonshotai/Kimi-K2-Instruct": {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
        "intermediate_size": 18432, "num_hidden_layers": 61, "num_attention_heads": 64, "num_key_value_heads": 64,
        "vocab_size": 163840, "max_position_embeddings": 131072, "rope_theta": 50000.0, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 384, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_group": 1, "topk_group": 1,
        "routed_scaling_factor": 2.827, "norm_topk_prob": True, "scoring_func": "sigmoid",
        "topk_method": "noaux_tc", "attention_bias": False,
        "rope_scaling": {
            "type": "yarn", "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
        },
        "tie_word_embeddings": False,
    },
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": {
        "architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", **_TEXT,
        "text_config": {
            "model_type": "llama4_text", "hidden_size": 5120, "intermediate_size": 8192,
            "intermediate_size_mlp": 16384, "num_hidden_layers": 48, "num_attention_heads": 40,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 202048, "max_position_embeddings": 10485760,
            "rope_theta": 500000.0, "num_local_experts": 16, "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1, "use_qk_norm": True, "attention_chunk_size": 8192,
            "attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1, "no_rope_layers": [],
            "rope_scaling": {
                "rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
            },
        },
    },
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct": {
        "architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", **_TEXT,
        "text_config": {
            "model_type": "llama4_text", "hidden_size": 5120, "intermediate_size": 8192,
            "intermediate_size_mlp": 16384, "num_hidden_layers": 48, "num_attention_heads": 40,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 202048, "max_position_embeddings": 1048576,
            "rope_theta": 500000.0, "num_local_experts": 128, "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2, "use_qk_norm": False, "attention_chunk_size": 8192,
            "attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1, "no_rope_layers": [],
            "rope_scaling": None,
        },
    },
    "openai/gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880,
        "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64, "vocab_size": 201088, "max_position_embeddings": 131072, "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "sliding_window": 128, "num_local_experts": 32, "num_experts_per_tok": 4, "attention_bias": True,
        "layer_types": ["sliding_attention", "full_attention"] * 12, "tie_word_embeddings": False,
    },
    "google/gemma-2-9b-it": {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_size": 3584,
        "intermediate_size": 14336, "num_hidden_layers": 42, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 256, "vocab_size": 256000, "max_position_embeddings": 8192, "sliding_window": 4096,
        "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    },
    "google/gemma-3-1b-it": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 1152,
        "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1,
        "head_dim": 256, "vocab_size": 262144, "max_position_embeddings": 32768, "sliding_window": 512,
        "sliding_window_pattern": 6, "rope_theta": 1000000, "rope_local_base_freq": 10000,
        "query_pre_attn_scalar": 256,
    },
    "google/gemma-3-27b-it": {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", **_TEXT,
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62,
            "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "query_pre_attn_scalar": 168,
            "sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        },
    },
    "google/gemma-4-E2B-it": {
        "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", **_HEARD,
        "text_config": {
            "model_type": "gemma4_text", "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35,
            "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512,
            "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 20, "use_double_wide_mlp": True,
            "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7, "final_logit_softcapping": 30.0,
        },
    },
    "google/gemma-4-E4B-it": {
        "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", **_HEARD,
        "text_config": {
            "model_type": "gemma4_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 42,
            "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "global_head_dim": 512,
            "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 18, "final_logit_softcapping": 30.0,
        },
    },
    "google/gemma-4-26B-A4B-it": {
        "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", **_TEXT,
        "text_config": {
            "model_type": "gemma4_text", "hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30,
            "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "global_head_dim": 512,
            "num_global_key_value_heads": 2, "attention_k_eq_v": True, "sliding_window": 1024,
            "max_position_embeddings": 262144, "hidden_size_per_layer_input": 0, "enable_moe_block": True,
            "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704, "final_logit_softcapping": 30.0,
        },
    },
    "google/gemma-4-31B-it": {
        "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", **_TEXT,
        "text_config": {
            "model_type": "gemma4_text", "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 60,
            "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 256, "global_head_dim": 512,
            "num_global_key_value_heads": 4, "attention_k_eq_v": True, "sliding_window": 1024,
            "max_position_embeddings": 262144, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0,
        },
    },
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506": {
        "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", **_TEXT,
        "text_config": {
            "model_type": "mistral", "hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072,
            "max_position_embeddings": 131072, "rope_theta": 1000000000.0, "sliding_window": None,
            "rms_norm_eps": 1e-05,
        },
    },
    "mistralai/Ministral-3-8B-Base-2512": {
        "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", **_TEXT,
        "text_config": {
            "model_type": "ministral3", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 34,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072,
            "max_position_embeddings": 262144, "sliding_window": None, "rms_norm_eps": 1e-05,
            "rope_parameters": {
                "type": "yarn", "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0,
                "original_max_position_embeddings": 16384, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
                "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
            },
        },
    },
}  # fmt: skip

_FP8_BLOCKS = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
}  # fmt: skip
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
_W4A16 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
_QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
    "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960, "rope_theta": 1000000.0,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1,
    "norm_topk_prob": True, "mlp_only_layers": [], "tie_word_embeddings": False,
}  # fmt: skip
PUBLISHED_QUANTIZED: Mapping[str, Mapping[str, Any]] = {
    "Qwen/Qwen3-30B-A3B-FP8": {**_QWEN3_MOE, "quantization_config": _FP8_BLOCKS},
    "Qwen/Qwen3-30B-A3B-GPTQ-Int4": {
        **_QWEN3_MOE,
        "quantization_config": {
            "quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True,
            "dynamic": {"-:.*mlp.gate$": {}},
        },
    },
    "a Qwen3-30B-A3B in AWQ": {
        **_QWEN3_MOE, "quantization_config": {**_AWQ, "modules_to_not_convert": ["gate"]},
    },
    "a Mixtral-8x7B in AWQ": {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 32000, "max_position_embeddings": 32768, "rope_theta": 1000000.0, "num_local_experts": 8,
        "num_experts_per_tok": 2, "tie_word_embeddings": False,
        "quantization_config": {**_AWQ, "modules_to_not_convert": ["gate"]},
    },
    "deepseek-ai/DeepSeek-V3-0324": {
        **PUBLISHED["deepseek-ai/DeepSeek-V3-0324"], "quantization_config": _FP8_BLOCKS,
    },
    "moonshotai/Kimi-K2-Thinking": {
        **PUBLISHED["moonshotai/Kimi-K2-Instruct"],
        "quantization_config": {
            "quant_method": "compressed-tensors", "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": _W4A16}},
            "ignore": [
                "lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
            ],
        },
    },
}  # fmt: skip
"""The same of checkpoints that are quantized already."""
