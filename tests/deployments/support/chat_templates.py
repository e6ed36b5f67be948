"""Small chat templates with tools, in the style of the models whose call formats Raydix reads."""

HERMES = r"""
{%- if tools %}{{ '<|im_start|>system\nTools:\n' }}
{%- for tool in tools %}{{ tool | tojson ~ '\n' }}{% endfor %}
{{- 'Call with <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>' ~ message.content ~ '</tool_response><|im_end|>\n' }}
{%- else %}{{ '<|im_start|>' ~ message.role ~ '\n' }}
{%- if message.reasoning_content %}{{ '<think>' ~ message.reasoning_content ~ '</think>' }}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>{"name": "' ~ call.function.name ~ '", "arguments": ' }}
{{- call.function.arguments | tojson ~ '}</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

LLAMA3 = r"""
{%- macro head(role) %}{{ '<|start_header_id|>' ~ role ~ '<|end_header_id|>\n' }}{% endmacro %}
{%- if tools %}{{ head('system') ~ 'Answer as {"name": ..., "parameters": ...} to call one of:\n' }}
{%- for tool in tools %}{{ tool.function | tojson ~ '\n' }}{% endfor %}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}{{ head('ipython') ~ message.name ~ ' gave ' ~ message.content | tojson }}
{%- elif 'tool_calls' in message %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set called = message.tool_calls[0].function %}
{{- head('assistant') ~ '{"name": "' ~ called.name ~ '", "parameters": ' ~ called.arguments | tojson ~ '}' }}
{%- else %}{{ head(message.role) ~ message.content }}{% endif %}{{ '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ head('assistant') }}{% endif %}"""

_BEGIN = r"'<|im_start|>assistant\n' }}{% endif %}"
THINKING = HERMES.replace(_BEGIN, _BEGIN.replace(r"\n", r"\n<think>\n"))
"""A template that begins the reasoning itself."""
