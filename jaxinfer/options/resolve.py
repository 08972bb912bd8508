"""What an engine is, decided in one place from the options, the model and the device, with the reason of each choice.

    resolve(options, model, device) -> Resolved

A pure function of three values: no weights are read and no device is asked, so `jaxinfer compile` and `jaxinfer plan`
decide for an absent chip what `LLM` would decide on it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxinfer.engine import EngineConfig
from jaxinfer.forward import kv_groups
from jaxinfer.kv_cache import KVCacheSpec, KVGroup
from jaxinfer.models.spec import ModelModule, smoothing_groups
from jaxinfer.options import defaults
from jaxinfer.options.defaults import Choice
from jaxinfer.options.device_facts import DeviceFacts
from jaxinfer.options.llm_options import SHAPES, LLMOptions
from jaxinfer.programs.arguments import ArgumentShapes
from jaxinfer.programs.buckets import Buckets, Program
from jaxinfer.programs.compile import Programs
from jaxinfer.programs.saved_programs import SavedPrograms
from jaxinfer.scheduler import SchedulerConfig
from jaxinfer.tools.planner.engine_plan import EnginePlan, PlanError, check
from jaxinfer.weights import weight_forms
from jaxinfer.weights.quantization import Kernels
from jaxinfer.weights.weight_forms import ModelFacts, WeightForm


@dataclass(frozen=True)
class Resolved:
    """Everything static about an engine. Equal values compile equal programs."""

    options: LLMOptions
    model: ModelFacts
    device: DeviceFacts
    config: Any  # of the model, its dtype decided
    form: WeightForm
    spec: KVCacheSpec
    scheduler: SchedulerConfig
    buckets: Buckets
    matmul_precision: str | None
    compiler_options: Mapping[str, Any]
    plan: EnginePlan | None  # None: it was refused
    plan_problem: str | None  # the sentence with which it was
    choices: Mapping[str, Choice]  # what was chosen -> the value and why

    @property
    def max_model_len(self) -> int:
        return self.scheduler.max_model_len

    def lines(self) -> list[str]:
        """The choices and the plan for people, to be logged at start."""
        lines = [f"{name}: {choice.value}, since {choice.reason}" for name, choice in self.choices.items()]
        lines.append(f"programs: {', '.join(self.programs())}")
        return lines + ([] if self.plan is None else self.plan.lines())

    def llm_options(self) -> dict[str, Any]:
        """Keyword arguments with which `LLM` resolves to these very programs on this kind of device."""
        settled = {
            "dtype": self.config.dtype,
            "few_rows": "packed" if self.form.packed else "full",
            "max_model_len": self.max_model_len,
            "num_pages": self.spec.num_pages,
            "kv_cache_memory_bytes": None,
            "gpu_memory_utilization": None,
            "page_size": self.spec.page_size,
            "implementation": self.spec.implementation,
            "matmul_precision": self.matmul_precision,
        }
        return {name: getattr(self.options, name) for name in SHAPES} | settled

    def engine_config(self, *, cache_salt: str = "") -> EngineConfig:
        """The part of an engine that is static beside its programs.

        cache_salt: names the weights: pages are shared only under the same name.
        """
        return EngineConfig(
            scheduler=self.scheduler,
            buckets=self.buckets,
            enable_prefix_caching=self.options.enable_prefix_caching,
            cache_salt=cache_salt,
            logits_processor_args=self.options.logits_processor_args,
        )

    # The programs, as the engine compiles them

    def programs(self) -> dict[str, Program]:
        """All programs of the warm-up, by name."""
        return {str(program): program for program in self.buckets.programs()}

    def weights(self) -> Any:
        """Shapes of the weights."""
        return weight_forms.shapes(self.model, self.config, self.form)

    def compiler(
        self,
        saved: SavedPrograms | None = None,
        *,
        weights: Any = None,
        sharding: jax.sharding.Sharding | None = None,
    ) -> Programs:
        """What compiles the programs.

        Args:
          weights: that they will run on; None takes their shapes.
          sharding: where all arguments lie; None leaves them to the default device.
        """
        if weights is None:
            weights = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), self.weights()
            )
        rows, length = self.scheduler.max_num_seqs, self.scheduler.max_model_len
        return Programs(
            self.model.module,
            ArgumentShapes(self.config, weights, self.spec, rows, length, sharding),
            logprobs_mode=self.options.logprobs_mode,
            logits_processors=tuple(self.options.logits_processors),
            matmul_precision=self.matmul_precision,
            compiler_options=self.compiler_options,
            strict=self.options.strict_compile,
            saved=saved,
        )


def _groups(module: ModelModule, config: Any) -> tuple[KVGroup, ...]:
    """The KV groups of a model, their sizes still to be decided; () of one without a window."""
    groups = tuple(KVGroup(layers, window, 2) for layers, window in kv_groups(module, config))
    return groups if len(groups) > 1 or groups[0].window is not None else ()


def resolve(
    options: LLMOptions, model: ModelFacts, device: DeviceFacts, *, must_fit: bool = True
) -> Resolved:
    """Decides what an engine with these options is on such a device.

    Args:
      must_fit: False: where the plan is refused, the pool is num_pages or as small as one sequence of max_model_len
        needs, and `plan_problem` has the sentence; a compiler may then be asked all the same.

    Raises:
      PlanError: weights, pages and a step do not fit.
      ValueError: an option cannot be with this model or device; the message says what can.
    """
    config, form, precision, choices = _numeric_form(options, model, device)
    longest = config.max_position_embeddings
    max_model_len = longest if options.max_model_len is None else options.max_model_len
    if max_model_len > longest:
        raise ValueError(
            f"max_model_len={max_model_len} is over the model's own maximum of {longest} positions"
        )
    config = config.for_context(max_model_len)
    attention = defaults.implementation(options.implementation, device, config.dtype, config.head_dim)
    page_size = defaults.page_size(options.page_size, device.platform, max_model_len)
    spec = KVCacheSpec(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=page_size.value,
        num_pages=2,  # decided by the plan, and in each group
        groups=_groups(model.module, config),
        dtype=config.dtype,
        implementation=attention.value,
        compute_capability=device.compute_capability,
    )
    tile = defaults.tile(options.batch_invariant, device, spec.implementation, options.quantize)
    sizes = options.max_num_seqs, options.max_num_batched_tokens, options.decode_steps
    buckets = replace(options.buckets or Buckets.default(*sizes, device.platform, tile), tile=tile)
    scheduler = options.scheduler(max_model_len, buckets.max_multi_step_rows)
    buckets.check(scheduler)
    plan, problem = _plan(options, model, device, config, form, spec)
    if problem is not None and must_fit:
        raise problem
    per_sequence = spec.pages_per_sequence(max_model_len, scheduler.max_step_tokens)
    smallest = options.num_pages or 1 + max(per_sequence)
    compiler_options = defaults.compiler_options(device)
    return Resolved(
        options=options,
        model=model,
        device=device,
        config=config,
        form=form,
        spec=spec.sized(smallest if plan is None else plan.num_pages, per_sequence),
        scheduler=scheduler,
        buckets=buckets,
        matmul_precision=precision,
        compiler_options=compiler_options.value,
        plan=plan,
        plan_problem=None if problem is None else str(problem),
        choices={
            "attention": attention,
            "page size": page_size,
            **choices,
            "compiler options": compiler_options,
        },
    )


def _plan(
    options: LLMOptions,
    model: ModelFacts,
    device: DeviceFacts,
    config: Any,
    form: WeightForm,
    spec: KVCacheSpec,
) -> tuple[EnginePlan | None, PlanError | None]:
    """What the engine allocates, or why it cannot."""
    num_bytes = weight_forms.num_bytes(weight_forms.shapes(model, config, form))
    loaded = model.weights_given and form.is_plain
    try:
        plan = check(
            model.module,
            config,
            device,
            spec,
            options,
            weights_bytes=num_bytes,
            weights_loaded=loaded,
        )
    except PlanError as error:
        return None, error
    return plan, None


def _numeric_form(
    options: LLMOptions, model: ModelFacts, device: DeviceFacts
) -> tuple[Any, WeightForm, str | None, dict[str, Choice]]:
    """(config with dtype and kernels, form of the weights, precision of products, the choices in them)."""
    dtype = defaults.dtype(options.dtype, device.platform)
    if model.weights_given:
        dtype = Choice(model.config.dtype, "the weights that were given have it")
    products = defaults.plain_matmul(device)
    kernels = Kernels(matmul=products.value, gated_mlp=products.value)
    config = replace(model.config, dtype=dtype.value, kernels=kernels)
    precision = defaults.matmul_precision(options.matmul_precision, config.dtype)
    form, choices = _weight_form(options, model, config, device)
    choices = {"dtype": dtype, "products": products, "precision of products": precision} | choices
    return config, form, precision.value, choices


def _weight_form(
    options: LLMOptions, model: ModelFacts, config: Any, device: DeviceFacts
) -> tuple[WeightForm, dict[str, Choice]]:
    """The form of the weights, and the choices in it."""
    plain = options.quantize is None and not options.batch_invariant
    few_rows = defaults.few_rows(options.few_rows, device, plain, bool(model.blocks))
    choices = {"products of few rows": few_rows}
    if options.quantize is None:
        return WeightForm(packed=few_rows.value == "packed"), choices
    if config.dtype == "float16":
        raise ValueError(f"quantize={options.quantize!r} works with dtype float32 or bfloat16, not float16")
    products = defaults.products(device)
    smooth = device.platform == "cpu" and bool(smoothing_groups(model.module.LEAVES))
    matmul = defaults.quantized_matmul(device, weight_forms.matrix_shapes(model, config))
    choices |= {"products in int8": products, "products with quantized matrices": matmul}
    return WeightForm(options.quantize, products.value, smooth, matmul=matmul.value), choices
