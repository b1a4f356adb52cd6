"""Sentences in which it is known which word belongs to which, to find what each head does.

They were written for this purpose. SYNTAX holds whole sentences, each word of a relation with a
mark behind it:

    s subject   v its verb   o the verb's object   n another noun
    d determiner, a adjective: of the next noun that is marked

A causal model looks back only, so a relation goes from the later word to the earlier one: from the
verb to its subject, from the object to its verb, from the noun to its determiner and adjective. An
adjective that stands right before its noun is left out: a head that looks at the word before would
find it without knowing of adjectives. So between adjective and noun stands another noun ("wool
coat"), and nowhere does a sentence begin with a marked word, because many heads park their
attention on the first token.

PRONOUNS holds frames in which two people of different sex meet, and the text ends with a pronoun.
Each is filled four ways, with both orders of the two and with both pronouns. So what is right turns
on the gender of the pronoun alone: always the first, always the nearer and any fixed distance are
right in exactly half of the cases.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

VERSION = 1  # of the texts; raise it when they change


class Pair(NamedTuple):
    """In a sentence the word at `source` belongs to the earlier one at `target`.

    Both are (start, end) in the text. `rival` is a word that fits as well but for what the role is
    about: the other person for a pronoun, None elsewhere.
    """

    role: str
    source: tuple[int, int]
    target: tuple[int, int]
    rival: tuple[int, int] | None = None


class Sentence(NamedTuple):
    """A text and what belongs together in it; `half` (0 or 1) chooses heads or judges them."""

    text: str
    pairs: tuple[Pair, ...]
    half: int


SYNTAX = """
Yesterday the/d tired/a village doctor/s sold/v a/d horse/o
In spring my/d aunt/s usually paints/v the/d long/a back garden fence/o
Every morning the/d bakers/s in town sell/v bread/o
Last year a/d judge/s of the high court bought/v the/d boat/o
After lunch the/d girls/s who lived near the river built/v a/d small/a stone bridge/o
At night the/d guard/s at the gate watches/v, without any sleep, every/d street/o
On Monday the/d strict/a school teacher/s explained/v the/d rule/o
Long ago a/d king/s cruelly ruled/v this/d very cold/a mountain border country/o
Before dinner the/d uncles/s from Rome drank/v wine/o
This week the/d students/s of the old music school sang/v the/d song/o
Sometimes the/d dog/s that belongs to our neighbour steals/v a/d warm/a meat pie/o
In winter the/d men/s in the village carve/v, by the fire, some/d figures/o
Later the/d brave/a army pilot/s studied/v a/d map/o
Today a/d nurse/s quietly visited/v his/d extremely sick/a childhood school friend/o
For years the/d sailors/s on board feared/v storms/o
Then the/d cook/s from the new French place dropped/v the/d bowl/o
At noon the/d boys/s who often hid behind the barn found/v a/d rusty/a garden key/o
In the end the/d witness/s with the scar believed/v, after much doubt, the/d lawyer/o
Once a/d greedy/a silk merchant/s lost/v his/d money/o
Last night the/d cat/s suddenly caught/v a/d rather large/a winter field mouse/o
Every summer the/d children/s from camp climb/v hills/o
Meanwhile the/d driver/s of the bright yellow bus repaired/v the/d window/o
In May the/d gardener/s who worked for my parents planted/v a/d young/a apple tree/o
Now the/d painter/s near the window mixes/v, drop by drop, a/d colour/o
On Sunday the/d friendly/a church singer/s invited/v my/d mother/o
At first the/d soldiers/s hardly heard/v the/d faint/a enemy ship engine/o
Soon the/d engineers/s up north measured/v rainfall/o
In autumn the/d wind/s from the dark grey sea shook/v the/d house/o
After school the/d twins/s that I met last summer visit/v their/d kind/a piano teacher/o
Here the/d waiter/s with the gloves carried/v, on one hand, a/d plate/o
Two days ago a/d clever/a bank robber/s took/v the/d diamond/o
Next to us the/d woman/s slowly read/v a/d thick/a world history book/o
In March the/d queens/s of Spain wrote/v poems/o
Over there the/d mechanic/s under the big red truck cleaned/v the/d pump/o
This time the/d captain/s who leads our young team kicked/v a/d wet/a leather ball/o
Back then the/d monks/s in the tower copied/v, word for word, this/d book/o
By accident the/d careless/a window cleaner/s broke/v the/d lamp/o
In secret the/d princess/s always kept/v a/d really tiny/a family glass bird/o
At dawn the/d hunters/s without dogs followed/v wolves/o
Usually the/d manager/s of the small local bank signs/v each/d letter/o
On the train a/d lady/s who was talking too much lost/v her/d green/a silk scarf/o
For lunch the/d workers/s on the roof ate/v, as they always did, the/d soup/o
Last week the/d rich/a factory owner/s hid/v his/d gold/o
Outside the/d horses/s greedily ate/v some/d sweet/a mountain summer grass/o
In the evening the/d fishermen/s on shore mend/v nets/o
After the storm the/d mayor/s of the little coastal town thanked/v the/d pilot/o
During the war my/d grandfather/s who knew several printers wrote/v a/d secret/a daily paper/o
In this film the/d actor/s with the scar plays/v, in my opinion, a/d killer/o
On his way the/d polite/a young country prince/s greeted/v the/d girl/o
Without a word the/d maid/s quickly washed/v the/d muddy/a leather riding boots/o
At the market the/d women/s with carts sell/v cheese/o
In the morning the/d sun/s above the high snowy hills melts/v the/d ice/o
That day the/d reporter/s who came from the radio asked/v a/d simple/a trick question/o
By noon the/d clerk/s at the desk counted/v, for the third time, the/d coins/o
In class the/d lazy/a village pupils/s drew/v a/d monster/o
Every year the/d birds/s bravely cross/v the/d wide/a northland winter sea/o
At last the/d widows/s of war got/v money/o
Upstairs the/d baby/s in the old wooden crib threw/v the/d bear/o
With great care the/d chemist/s who had won a prize heated/v the/d clear/a salt water/o
In the dark the/d miners/s with the lamps dug/v, metre by metre, a/d tunnel/o
Behind the house the/d hungry/a farm dog/s buried/v the/d bone/o
After a while the/d visitor/s loudly praised/v the/d truly excellent/a house tomato sauce/o
On Friday the/d members/s of parliament chose/v leaders/o
Before the show the/d magician/s in the long black cloak checked/v the/d door/o
In June the/d tourists/s who stay in our hotel photograph/v the/d famous/a city gate/o
Again the/d boss/s of the firm ignored/v, with a smile, the/d report/o
In the garden the/d busy/a honey bees/s love/v these/d roses/o
At the end the/d singer/s softly played/v a/d slow/a village dance tune/o
Across the street the/d barbers/s from Turkey cut/v hair/o
This morning the/d postman/s of our quiet little street delivered/v a/d parcel/o
For fun the/d boys/s who sat in the back folded/v a/d perfect/a paper plane/o
Under the bridge the/d beggar/s with the crutch found/v, to his surprise, a/d ring/o
In town the/d elderly/a dress maker/s sews/v our/d coats/o
After the meeting the/d chief/s angrily burned/v the/d utterly false/a winter peace treaty/o
Near the coast the/d pirates/s with guns attacked/v ships/o
In the library the/d professor/s with the heavy brown pipe found/v the/d score/o
From the tower the/d watchman/s who never slept at night saw/v a/d red/a signal fire/o
On the hill the/d shepherd/s of the monastery guards/v, alone and unarmed, the/d sheep/o
At home the/d old/a army officer/s kept/v his/d jacket/o
In the lab the/d scientist/s secretly tested/v a/d cheap/a bicycle wind engine/o
In one hour the/d robots/s by themselves pack/v bottles/o
With a smile the/d grandmother/s of the pretty young bride cut/v the/d cake/o
Down the road the/d builders/s that the city had hired closed/v a/d dangerous/a bridge hole/o
In the story a/d dragon/s with green wings guards/v, day and night, the/d temple/o
Just now the/d busy/a office secretary/s wrote/v a/d note/o
From time to time the/d owner/s gladly offers/v us a/d strong/a mountain herb drink/o
In the past the/d people/s of Persia hunted/v lions/o
During the break the/d coach/s of the tall blonde girls changed/v the/d plan/o
At the station the/d police/s who wore no uniform searched/v a/d nervous/a bank robber/o
In his youth the/d poet/s from the harbour loved/v, more than life, a/d dancer/o
On the beach the/d happy/a tourist children/s built/v a/d castle/o
All day the/d pianist/s tirelessly practised/v a/d noisy/a chamber concert piece/o
Then one day the/d ants/s under stones discovered/v sugar/o
Under the tree the/d couple/s in the blue summer clothes shared/v a/d sandwich/o
In silence the/d crowd/s that stood before the palace watched/v the/d solemn/a state funeral/o
As always the/d expert/s on the screen predicted/v, with great confidence, a/d flood/o
"""

# Two halves of nouns and of frames, so that a head is judged on words it was not chosen by.
PEOPLE = (
    (("king", "queen"), ("boy", "girl"), ("father", "mother"), ("actor", "actress")),
    (("man", "woman"), ("uncle", "aunt"), ("prince", "princess"), ("son", "daughter")),
)
CUES = (("he", "she"), ("his", "her"))
PRONOUNS = (
    (
        "Yesterday the {} thanked the {} because {he}",
        "In the garden the {} waited for the {} until {he}",
        "Last night the {} told the {} that {he}",
        "At the market the {} lost sight of the {} when {he}",
        "After dinner the {} gave the {} a coat, since {he}",
        "Every day the {} drove the {} to the station before {he}",
        "One morning the {} met the {} on the bridge, and {he}",
        "On the way home the {} showed the {} a photo of {his}",
    ),
    (
        "Last week the {} helped the {} because {he}",
        "In the kitchen the {} argued with the {} until {he}",
        "This time the {} warned the {} that {he}",
        "On the stairs the {} ran into the {} while {he}",
        "Before lunch the {} sent the {} a letter, but {he}",
        "Once the {} followed the {} across the field after {he}",
        "That evening the {} sat beside the {} by the fire, and {he}",
        "On Sunday the {} gave the {} a picture of {his}",
    ),
)


def syntax() -> Iterator[Sentence]:
    """The sentences of SYNTAX; every second one is of the other half.

    >>> first = next(syntax())
    >>> first.text, len(first.pairs)
    ('Yesterday the tired village doctor sold a horse.', 5)
    """
    for number, line in enumerate(SYNTAX.strip().splitlines()):
        yield _marked(line + ".", number // 6 % 2)


def _marked(line: str, half: int) -> Sentence:
    text, end, places = "", 0, []
    for mark in re.finditer(r"([\w']+)/(\w)", line):
        text += line[end : mark.start()]
        places.append((mark[2], (len(text), len(text) + len(mark[1]))))
        text, end = text + mark[1], mark.end()
    text += line[end:]
    pairs: list[Pair] = []
    waiting: list[tuple[str, tuple[int, int]]] = []
    place_of: dict[str, tuple[int, int]] = {}
    for kind, place in places:
        place_of[kind] = place
        if kind in "da":
            waiting.append((kind, place))
        elif kind in "son":
            for other, earlier in waiting:
                if other == "d":
                    pairs.append(Pair("noun_determiner", place, earlier))
                elif text[earlier[1] : place[0]].strip():  # another word stands between
                    pairs.append(Pair("noun_adjective", place, earlier))
            waiting.clear()
        if kind == "v":
            pairs.append(Pair("verb_subject", place, place_of["s"]))
        if kind == "o":
            pairs.append(Pair("object_verb", place, place_of["v"]))
    return Sentence(text, tuple(pairs), half)


def pronouns() -> Iterator[Sentence]:
    """The frames of PRONOUNS, each with two couples of its half, four ways each."""
    for half, (frames, people) in enumerate(zip(PRONOUNS, PEOPLE, strict=True)):
        for number, frame in enumerate(frames):
            for shift in (0, 1):
                couple = people[(number + shift) % len(people)]
                for first in (0, 1):
                    for gender in (0, 1):
                        yield _filled(frame, couple, first, gender, half)


def _filled(frame: str, couple: tuple[str, str], first: int, gender: int, half: int) -> Sentence:
    he, his = (cue[gender] for cue in CUES)
    text = frame.format(couple[first], couple[1 - first], he=he, his=his)
    places = [re.search(rf"\b{noun}\b", text) for noun in couple]
    right, wrong = (places[k].span() for k in (gender, 1 - gender))  # type: ignore[union-attr]
    cue = text.rindex(" ") + 1, len(text)
    return Sentence(text, (Pair("pronoun_noun", cue, right, wrong),), half)


# What follows turns on which of the two the pronoun meant. The model is asked for the last noun.
CONTINUED = (
    "Yesterday the {} thanked the {} because {he} was so kind. The kind one was the",
    "Yesterday the {} thanked the {} because {he} was kind. So the one who was kind is the",
    "Yesterday the {} met the {}, and {he} was angry. Nobody could calm the angry",
    "Yesterday the {} met the {}, and {he} was tired, so they carried the tired",
)


def continued() -> Iterator[tuple[str, str, str]]:
    """Texts that break off before a noun, with the right noun and the wrong one."""
    for number, frame in enumerate(CONTINUED):
        for couple in (PEOPLE[1][number], PEOPLE[1][(number + 1) % len(PEOPLE[1])]):
            for first in (0, 1):
                for gender in (0, 1):
                    text = frame.format(couple[first], couple[1 - first], he=CUES[0][gender])
                    yield text, couple[gender], couple[1 - gender]
