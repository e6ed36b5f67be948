"""Invents names that do not exist, so that the model learns to say "I don't know".

There are three kinds, because a model refuses only the kinds that it has seen: made-up words (`os.frobdal_open`),
real parts in wrong combinations (`json.heappush`, `str.walk_lines`) and other libraries (`numpy.array`).
"""

from __future__ import annotations

import random
import re

from training.corpus import Fact

FOREIGN = """
numpy.array numpy.zeros numpy.dot np.mean pandas.DataFrame pandas.read_csv pd.concat requests.get requests.post
torch.tensor torch.nn.Linear tensorflow.constant flask.Flask django.db.models.Model fastapi.FastAPI ray.get
ray.remote matplotlib.pyplot.plot sklearn.fit scipy.optimize.minimize yaml.safe_load pytest.fixture attrs.define
pydantic.BaseModel sqlalchemy.create_engine boto3.client PIL.Image.open cv2.imread console.log Array.map
System.out.println std::sort fmt.Println printf malloc foo bar foo.bar spam eggs my_function some_method
""".split()  # noqa: SIM905
SYLLABLES = """
ba bro cu dal dri el fro fli gan ger hom il jun ka kle lo lum mab mir nok ol pra pli qua rin ru sa ske sto ta tri
ul ver vo wex ya zin zot frob quux zap blorp snork wib ble flim gronk
""".split()  # noqa: SIM905
WORDS = """
magic turbo mega super happy banana unicorn coffee rocket pizza dragon wizard purple clever auto easy cloud
quantum robot cookie party lucky music hello world teleport fly dance paint cook dream jump swim guess predict
""".split()  # noqa: SIM905


class Inventor:
    """Invents names with `rng` that are in none of `facts`."""

    def __init__(self, facts: list[Fact], rng: random.Random) -> None:
        self._facts = facts
        self._random = rng
        self._taken = {fact.full for fact in facts} | {fact.name for fact in facts}

    def name(self) -> str:
        """Return a name of one of the three kinds."""
        kind = self._random.random()
        if kind < 0.08:
            return self._random.choice(FOREIGN)
        made = self.around(self._stem()) if kind < 0.6 else self._recombined()
        return made if made not in self._taken else self.name()

    def around(self, stem: str) -> str:
        """Combine the made-up word `stem` with a module, a class or a part of a real name."""
        pick = self._fact
        last = pick().name.rpartition(".")[2]
        forms = [
            f"{pick().module}.{stem}",
            f"{pick().module}.{stem}_{last}",
            f"{pick().module}.{last}_{stem}",
            f"{pick().full}.{stem}",
            f"{stem}.{last}",
            f"{stem}_{last}",
            f"{last}_{stem}",
            stem,
        ]
        return self._random.choice(forms)

    def _recombined(self) -> str:
        one, other = self._fact(), self._fact()
        last = other.name.rpartition(".")[2]
        parts = [self._random.choice(re.findall(r"[A-Z]?[a-z]+|\d+", fact.name) or ["x"]) for fact in (one, other)]
        forms = [f"{one.module}.{last}", f"{one.full}.{last}", f"{one.module}.{'_'.join(parts)}", "".join(parts)]
        return self._random.choice(forms)

    def _stem(self) -> str:
        if self._random.random() < 0.3:
            return self._random.choice(WORDS)
        stem = "".join(self._random.choices(SYLLABLES, k=self._random.randint(1, 3)))
        return stem.capitalize() if self._random.random() < 0.15 else stem

    def _fact(self) -> Fact:
        return self._random.choice(self._facts)
