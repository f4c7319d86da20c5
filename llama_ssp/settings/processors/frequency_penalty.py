"""Frequency penalty: taken off a token's logit for each time that the new text has it, as in OpenAI's API and vLLM."""

from llama_ssp.settings.processors import Penalty

FREQUENCY = Penalty(
    name="frequency_penalty",
    order=2,
    off=0.0,
    allows=lambda p: abs(p) <= 10**4,  # logits stay finite
    required="from -10000 to 10000, for example 0.5; 0 switches it off",
    audited=2.0,
    change=lambda logits_BTV, counts, penalty: logits_BTV - penalty * counts.of_text().to(logits_BTV.dtype),
)
