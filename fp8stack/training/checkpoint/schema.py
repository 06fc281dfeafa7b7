"""The content of `checkpoint.json`: what the writer writes and the reader accepts."""

from typing import Annotated, Any

from pydantic import BaseModel, Field, NonNegativeInt, PositiveFloat

from fp8stack.data.tokenizer import TokenizerIdentity

FORMAT = 1


class _Strict(BaseModel, frozen=True, extra="forbid", strict=True):
    """A JSON object with these keys and no others."""


class _Open(BaseModel, frozen=True, extra="allow", strict=True):
    """A JSON object whose other keys are kept, and not checked."""


class Identity(_Open):
    """The model, recipes and data of a run, which stay the same on resume."""

    model: dict[str, Any]
    recipe: dict[str, Any]
    data: dict[str, str]
    recipes: dict[str, dict[str, Any]] = {}  # of the variants, by index in `plans`


class NamedRecipe(_Open):
    """A recipe with its name, see `Recipe.to_json`."""

    name: str


class PlannedLayer(_Open):
    """A layer of a plan; `reason` says why it is not in FP8."""

    name: str
    reason: str
    fp8: bool = False


class SavedPlan(_Open):
    """See `Plan.to_json`."""

    recipe: NamedRecipe
    backend: str
    device: str
    compute_dtype: str
    layers: list[PlannedLayer]


class PhaseState(_Open):
    """See `Phases.state`."""

    ended_at: int | None
    judged_at: int
    entered: str | None
    reason: str | None = None
    places: dict[str, NonNegativeInt]


class ScalerState(_Open):
    """See `LossScaler.state_dict`."""

    scale: PositiveFloat
    growth_factor: PositiveFloat
    backoff_factor: PositiveFloat
    growth_interval: int
    growth_tracker: Annotated[int, Field(alias="_growth_tracker")]
    steps: NonNegativeInt = 0
    overflows: NonNegativeInt = 0


class MonitorState(_Open):
    """See `Monitor.state`."""

    window: list[list[float]]
    streak: int
    overflows: int
    recent: list[float] = []
    norms: list[float] = []


class GuardState(_Open):
    """See `Guard.state`."""

    watch: MonitorState
    left_out: list[int]
    demoted: dict[str, int | None]
    incidents: int
    last_bad: int
    mended_at: int | None = None
    tried: list[str]
    bad: list[dict[str, Any]]
    left_fp16: bool


class Info(_Strict):
    """A run's state besides tensors. Keys with a default are missing in older checkpoints."""

    identity: Identity
    config: dict[str, Any]
    plan: SavedPlan
    scaler: ScalerState | None
    versions: dict[str, str]
    guard: GuardState | None = None
    plans: list[SavedPlan] = []
    phases: PhaseState | None = None
    tokenizer: TokenizerIdentity | None = None


class FileSum(_Strict):
    """A file's size and checksum."""

    bytes: NonNegativeInt
    sha256: str


class Manifest(_Strict):
    """The content of `checkpoint.json`, without its own checksum."""

    format: int = FORMAT
    step: NonNegativeInt
    files: dict[str, FileSum]
    info: Info

    def to_json(self) -> dict[str, Any]:
        """The manifest as JSON data, for `Manifest(**data)`."""
        return self.model_dump(by_alias=True)
