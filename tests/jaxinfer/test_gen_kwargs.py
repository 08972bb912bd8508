"""Arguments of `generate` that evaluation tasks give."""

import pytest

from jaxinfer.tools.gen_kwargs import acting


def test_what_acts_stays_and_what_asks_for_nothing_goes():
    given = {"top_p": 0.9, "num_beams": 1, "use_cache": True, "length_penalty": 1.0, "pad_token_id": None}
    assert acting(given) == {"top_p": 0.9}


@pytest.mark.parametrize(("name", "value"), [("num_beams", 4), ("pad_token_id", 0), ("max_new_tokens", 5)])
def test_what_would_act_elsewhere_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"gen_kwargs {name}={value} does not act here"):
        acting({name: value})
