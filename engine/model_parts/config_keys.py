"""Tracks which keys of a config.json were read, and finds unread ones that could change the model's computation.

A reader gets a `TrackedConfig` instead of a plain dictionary. Keys that it did not read are listed when the model
is loaded. If their meaning is not certain, the model is rejected, because with an overlooked key it may answer
wrongly.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from engine.base.errors import ModelLoadError
from engine.model_parts.bounds import check_bounds

_KINDS = {
    "the library": """
        architectures model_type _name_or_path name_or_path transformers_version auto_map tokenizer_class prefix
        transformers.js_config _commit_hash license is_llama_config output_past language_model_only
        unsloth_fixed unsloth_version unsloth_training_args
        use_cache cache_implementation return_dict output_attentions output_hidden_states output_router_logits
        attn_implementation _attn_implementation _attn_implementation_autoset _attn_implementation_internal
        experts_implementation _experts_implementation _experts_implementation_internal _flash_attn_2_enabled
        use_flash_attn deterministic_flash_attn reference_compile repad_logits_with_grad chunk_size_feed_forward
        torchscript use_bfloat16 tf_legacy_loss pruned_heads is_decoder is_encoder_decoder tie_encoder_decoder
        add_cross_attention cross_attention_hidden_size""",
    "training": """
        initializer_range initializer_factor initializer_cutoff_factor gradient_checkpointing pretraining_tp
        ep_size seq_aux aux_loss_alpha router_jitter_noise attention_probs_dropout_prob hidden_dropout_prob
        sparse_prediction sparse_pred_ignore_index""",
    "heads for other tasks": """
        task_specific_params problem_type finetuning_task num_labels id2label label2id decoder_bias
        summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj""",
    "generation, which generation_config.json has": """
        do_sample early_stopping max_length min_length num_beams num_beam_groups num_return_sequences
        temperature top_k top_p typical_p repetition_penalty length_penalty diversity_penalty
        no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids suppress_tokens begin_suppress_tokens
        remove_invalid_values exponential_decay_length_penalty return_dict_in_generate output_scores""",
    "what a model sees and hears": """
        vision_config audio_config image_seq_length image_size mm_tokens_per_image vision_soft_tokens_per_image
        spatial_merge_size projector_hidden_act multimodal_projector_bias vision_feature_layer
        vision_feature_select_strategy mrope_section mrope_interleaved use_mrope""",
    "layers that predict further tokens": "num_nextn_predict_layers num_mtp_layers num_mtp_modules use_mtp",
    "what another key says as well": """
        max_window_layers max_position_embeddings tie_word_embeddings _sliding_window_pattern
        initial_context_length max_sequence_length max_seq_len seq_length model_max_length
        mamba_ssm_dtype finetuned""",
}
"""Keys without influence on how a model computes text, by subject."""
_WITHOUT_EFFECT = frozenset(" ".join(_KINDS.values()).split())
_ENDINGS = ("_dropout", "_pdrop", "_loss_coef", "_token_id", "_token_index")
_BEGINNINGS = ("mtp_",)
_OF_QUANTIZATION = """
    version quantization_status global_compression_ratio kv_cache_scheme input_activations output_activations
    observer observer_kwargs dynamic scale_dtype zp_dtype num_bits type format run_compressed activation_scheme
    scale_fmt dequantize damp_percent damp_auto_increment static_groups true_sequential mse meta quantizer dataset
    tokenizer model_seqlen model_name_or_path model_file_base_name use_exllama disable_exllama exllama_config
    backend use_cuda_fp16 max_input_length cache_block_outputs batch_size pad_token_id pack_dtype
    block_name_to_quantize module_name_preceding_first_block do_fuse fuse_max_seq_len modules_to_fuse uri
    act_group_aware is_marlin_format modules_to_not_convert ignored_layers ignore
    global_sparsity sparsity_structure registry_requires_subclass targets"""
"""Keys of `quantization_config` for the making of the weights, or for optional rounding of activations."""


class TrackedConfig(Mapping[str, Any]):
    """The contents of a config.json. It and the objects in it track the keys that were read."""

    def __init__(self, raw: Mapping[str, Any], path: str = "") -> None:
        """`path` precedes each key in messages."""
        self._raw, self._path = raw, path
        self._read: set[str] = set()
        self._inside: dict[str, TrackedConfig] = {}

    def __getitem__(self, key: str) -> Any:
        value = self._raw[key]
        self._read.add(key)
        check_bounds(key, value, self._path)
        if not isinstance(value, dict):
            return value
        return self._inside.setdefault(key, TrackedConfig(value, f"{self._path}{key}."))

    def __iter__(self) -> Iterator[str]:
        return iter(self._raw)

    def __len__(self) -> int:
        return len(self._raw)

    def unread(self) -> Iterator[tuple[str, Any]]:
        """Yield the path and the value of each key that was not read."""
        for key, value in self._raw.items():
            if key not in self._read:
                yield self._path + key, value
            elif key in self._inside:
                yield from self._inside[key].unread()


def layered(*configs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return configs as one, in which the first one with a key gives its value. Unlike {**a, **b}, this reads only
    the keys that are looked up.
    """
    return ChainMap(*configs)  # type: ignore[arg-type]  # nothing is assigned


def agreed(raw: Mapping[str, Any], *keys: str) -> Any:
    """Return the value of synonymous keys. Raises KeyError if all are missing, ModelLoadError if two differ."""
    given = {key: raw[key] for key in keys if raw.get(key) is not None} or {keys[0]: raw[keys[0]]}
    (name, value), *others = given.items()
    for other, differing in others:
        if differing != value:
            raise ModelLoadError(f"{name} is {value!r} and {other} {differing!r}: expected the same, or one key")
    return value


@dataclass(frozen=True, slots=True)
class UnusedKeys:
    """The keys of a config.json that were not read, by their paths ("rope_scaling.factor")."""

    without_effect: tuple[str, ...] = ()
    """Keys that are empty, or do not influence how the model computes text."""
    uncertain: tuple[str, ...] = ()
    """The others."""
    source: str = "config.json"
    """Name of their source in messages."""

    @classmethod
    def of(cls, config: TrackedConfig, source: str = "config.json") -> UnusedKeys:
        """Return the unused keys of a config that has been read."""
        unread = list(config.unread())
        # rope_scaling replaces rope_parameters (`engine/model_parts/rope.py: rope_settings`).
        replaced = ("rope_parameters.",) if config.get("rope_scaling") else ()
        uncertain = tuple(
            path for path, value in unread if not (path.startswith(replaced) or _is_without_effect(path, value))
        )
        return cls(tuple(path for path, _ in unread if path not in uncertain), uncertain, source)

    def check(self, architecture: str, ignored: Collection[str]) -> None:
        """Raise ModelLoadError for an uncertain key that is not among those `ignored`."""
        if unknown := [path for path in self.uncertain if path not in ignored]:
            them = "it" if len(unknown) == 1 else "them"
            raise ModelLoadError(
                f"{self.source} has {', '.join(unknown)}, which Raydix does not know in a {architecture}, so "
                f"the model could compute something else than it was trained for. Use a version without {them}; "
                f"or, if you know that answers do not depend on {them}, set engine.ignored_config_keys: "
                f"[{', '.join(unknown)}]"
            )


def _is_without_effect(path: str, value: Any) -> bool:
    """Whether an unread key can be ignored, because it is empty or does not influence how text is computed."""
    if value is None or value is False or value in ("", [], {}):
        return True
    parts = path.split(".")
    key = parts[-1]
    if parts[0] in ("quantization_config", "compression_config") and key in _OF_QUANTIZATION.split():
        return True
    is_known = path in _WITHOUT_EFFECT or not _WITHOUT_EFFECT.isdisjoint(parts)
    return is_known or key.endswith(_ENDINGS) or key.startswith(_BEGINNINGS)
