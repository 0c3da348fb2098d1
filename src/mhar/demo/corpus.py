"""The bundled text: six novels, five to train on and one held out."""

from dataclasses import dataclass
from importlib.resources import files

from mhar.errors import unknown

NOVELS = (
    "emma",
    "mansfieldpark",
    "northangerabbey",
    "persuasion",
    "prideprejudice",
    "sensesensibility",
)


@dataclass(frozen=True, slots=True)
class Corpus:
    """`training` holds the text of each novel to train on, `held_out` the text of the novel that is never seen."""

    training: tuple[str, ...]
    held_out: str


def read_novel(name: str) -> str:
    """The text of one bundled novel; ConfigurationError for a name that is not in `NOVELS`."""
    if name not in NOVELS:
        raise unknown("novel", name, NOVELS)
    return files("mhar.demo").joinpath("novels", f"{name}.txt").read_text(encoding="utf-8")


def load_corpus(held_out: str, max_characters: int | None = None) -> Corpus:
    """All novels but `held_out` to train on, each cut to `max_characters` (None: whole)."""
    held_out_text = read_novel(held_out)
    training = (read_novel(name)[:max_characters] for name in NOVELS if name != held_out)
    return Corpus(tuple(training), held_out_text[:max_characters])
