"""Arguments of transformers' `generate`, which evaluation tasks give, as fields of SamplingParams."""

from collections.abc import Mapping
from typing import Any

from jaxinfer.sampling.params import SAMPLING_FIELDS
from jaxinfer.text.wording import shown

# Arguments of transformers' generate that tasks give -> values with which they ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "diversity_penalty": (0,),
    "early_stopping": (False,),
    "encoder_no_repeat_ngram_size": (0,),
    "eos_token_id": (),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "length_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "pad_token_id": (),
    "penalty_alpha": (0,),
    "return_dict_in_generate": (True, False),
    "typical_p": (1,),
    "use_cache": (True, False),
}


def acting(gen_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves the arguments that are fields of SamplingParams.

    Raises:
      ValueError: another one asks for something that does not act here; the message names it and its value.
    """
    for name, value in gen_kwargs.items():
        asks_nothing = name in NEUTRAL and (value is None or value in NEUTRAL[name])
        if name not in SAMPLING_FIELDS and not asks_nothing:
            raise ValueError(
                f"gen_kwargs {name}={shown(value)} does not act here; leave it out, or use "
                f"{', '.join(sorted(SAMPLING_FIELDS))}"
            )
    return {name: value for name, value in gen_kwargs.items() if name in SAMPLING_FIELDS}
