"""Multiple-choice items in the manner of few-shot MMLU: subjects with a preamble of worked items each.

Made from small tables of facts, the same everywhere; the standard library alone, so that the oracle's Python reads
it too.
"""

import random
from dataclasses import dataclass

LETTERS = "ABCD"
NUM_SHOTS = 4  # worked items of a preamble
NUM_DRAWS = 2  # items that ask for the same fact beside other choices

# subject -> (question, "thing answer, thing answer, ..."; an underscore is a space)
FACTS = {
    "capitals": (
        "What is the capital of {}?",
        "France Paris, Japan Tokyo, Egypt Cairo, Canada Ottawa, Italy Rome, Spain Madrid, Germany Berlin, "
        "Russia Moscow, China Beijing, India New_Delhi, Greece Athens, Poland Warsaw, Austria Vienna, "
        "Norway Oslo, Sweden Stockholm, Finland Helsinki, Denmark Copenhagen, Portugal Lisbon, Hungary Budapest, "
        "Ireland Dublin, Cuba Havana, Peru Lima, Chile Santiago, Kenya Nairobi, Thailand Bangkok, Vietnam Hanoi",
    ),
    "chemistry": (
        "What is the chemical symbol of {}?",
        "hydrogen H, helium He, carbon C, nitrogen N, oxygen O, sodium Na, magnesium Mg, aluminium Al, silicon Si, "
        "sulfur S, chlorine Cl, potassium K, calcium Ca, iron Fe, copper Cu, zinc Zn, silver Ag, tin Sn, gold Au, "
        "mercury Hg, lead Pb, uranium U, neon Ne, nickel Ni, iodine I, lithium Li",
    ),
    "opposites": (
        "What is the opposite of {}?",
        "hot cold, big small, fast slow, high low, light dark, early late, hard soft, rich poor, young old, "
        "full empty, open closed, wet dry, strong weak, near far, loud quiet, happy sad, clean dirty, deep shallow, "
        "wide narrow, heavy weightless, sharp blunt, first last, good bad, up down, left right, north south",
    ),
    "french": (
        "What is the French word for {}?",
        "water eau, bread pain, house maison, cat chat, dog chien, sun soleil, moon lune, book livre, school école, "
        "tree arbre, red rouge, green vert, black noir, white blanc, milk lait, apple pomme, fish poisson, "
        "night nuit, day jour, friend ami, street rue, city ville, sea mer, horse cheval, bird oiseau, door porte",
    ),
    "young_animals": (
        "What is a young {} called?",
        "dog puppy, cat kitten, cow calf, horse foal, sheep lamb, goat kid, lion cub, duck duckling, goose gosling, "
        "swan cygnet, frog tadpole, deer fawn, chicken chick, kangaroo joey, owl owlet, eagle eaglet, pig piglet, "
        "hare leveret, butterfly caterpillar, seal pup, fly maggot, turkey poult, pigeon squab, eel elver",
    ),
    "past_tense": (
        "What is the past tense of {}?",
        "go went, see saw, eat ate, take took, come came, give gave, know knew, think thought, buy bought, "
        "bring brought, write wrote, speak spoke, run ran, sing sang, swim swam, drink drank, fly flew, draw drew, "
        "grow grew, begin began, break broke, choose chose, drive drove, fall fell, feel felt, find found",
    ),
    "continents": (
        "On which continent is {}?",
        "Brazil South_America, France Europe, Japan Asia, Egypt Africa, Canada North_America, Peru South_America, "
        "Italy Europe, China Asia, Kenya Africa, Mexico North_America, Chile South_America, Poland Europe, "
        "India Asia, Nigeria Africa, Cuba North_America, Bolivia South_America, Norway Europe, Iran Asia, "
        "Ghana Africa, Honduras North_America, Uruguay South_America, Greece Europe, Vietnam Asia, Mali Africa",
    ),
    "kinds": (
        "What kind of thing is a {}?",
        "hammer tool, apple fruit, carrot vegetable, piano instrument, sparrow bird, salmon fish, oak tree, "
        "rose flower, saw tool, banana fruit, onion vegetable, violin instrument, eagle bird, trout fish, "
        "pine tree, tulip flower, wrench tool, cherry fruit, cabbage vegetable, trumpet instrument, crow bird, "
        "herring fish, birch tree, daisy flower, chisel tool, pear fruit",
    ),
}


@dataclass(frozen=True)
class Item:
    subject: str
    preamble: str  # what items of the subject begin with
    question: str  # the rest of the prompt
    choices: tuple[str, ...]
    answer: int  # which of them is right

    @property
    def prompt(self) -> str:
        return self.preamble + self.question

    def continuations(self, score: str) -> list[str]:
        """What is compared after the prompt: "letters" or whole "options"."""
        return [f" {letter}" for letter in LETTERS] if score == "letters" else [f" {c}" for c in self.choices]


def make_items() -> list[Item]:
    """All items, subject by subject."""
    chance = random.Random(0)
    return [
        item for subject, (ask, facts) in FACTS.items() for item in _of_subject(subject, ask, facts, chance)
    ]


def _of_subject(subject: str, ask: str, text: str, chance: random.Random) -> list[Item]:
    facts = [fact.replace("_", " ") for fact in text.split(", ")]
    pairs = [(fact.split(" ")[0], fact.partition(" ")[2]) for fact in facts]
    answers = sorted({answer for _, answer in pairs})

    def draw(thing: str, answer: str) -> tuple[str, tuple[str, ...]]:
        choices = [*chance.sample([other for other in answers if other != answer], 3), answer]
        chance.shuffle(choices)
        listed = "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices))  # noqa: B905
        return f"Question: {ask.format(thing)}\n{listed}\nAnswer:", tuple(choices)

    preamble = f"The following are multiple choice questions about {subject.replace('_', ' ')}.\n\n"
    for thing, answer in pairs[:NUM_SHOTS]:
        question, choices = draw(thing, answer)
        preamble += f"{question} {LETTERS[choices.index(answer)]}\n\n"
    items = []
    for thing, answer in pairs[NUM_SHOTS:]:
        for _ in range(NUM_DRAWS):
            question, choices = draw(thing, answer)
            items.append(Item(subject, preamble, question, choices, choices.index(answer)))
    return items
