"""What the checkpoint in the box learns from: conversations, made on the fly, in the real chat format.

A conversation is a list of messages as generate.encode_messages takes them. `conversation` draws one; nothing
is stored, and the same random state gives the same text. Answers have one form for each kind of question, so
that what is asked for is copied and not invented; what is told and how it is asked vary as much as a grammar
lets them, so that it is not the phrasing that is learnt: in a template [a|b] is one of its alternatives and
{place} a word or a phrase of that kind.
"""

import json
import random
import re
import string
from typing import List, Tuple

NOUNS = """river stone tiger lemon rocket garden candle bridge forest window market planet mirror anchor
basket bottle castle desert engine farmer glacier hammer island jacket kitten ladder meadow needle orange
packet rabbit saddle teacher tunnel umbrella valley winter yellow zebra apple button camera doctor eagle
feather guitar harbor insect jungle kettle letter monkey napkin ocean pencil queen ribbon silver thunder
uncle violin wagon pepper cotton copper dragon falcon ginger helmet ivory jewel lantern marble nickel olive
parrot quartz rattle sensor table velvet walnut wizard canyon barrel carpet dolphin elbow fountain goblin
hazel iron juniper knight lizard magnet notebook oyster panther quilt raven spider temple unicorn vulture
whistle yogurt badge cactus donkey ember flute grape hornet icicle acorn album alley antler apron arrow
aunt autumn baby bacon badger bag baker ball balloon banana band bank barn bat battery beach bead beak bean
bear beard beast beaver bed bee beetle bell belt bicycle bird biscuit boat body bone book boot border bow
bowl box boy bracelet brain branch bread breeze brick bride broom brother brush bubble bucket bug bull bunny
bus bush butter cabin cable cake calendar calf camel camp canal canoe canvas cap cape captain card cargo
carrot cart cat cattle cave ceiling cellar chain chair chalk cheese cherry chess chest chicken child chin
circle circus clam class claw clay cliff clock cloth clover coach coal coast coat cobra coffee coin collar
comb comet cone cook cookie corn couch court cousin cow crab crane crate crayon cream creek crew cricket
crow crown crystal cube cup cupboard curtain cushion daisy dance dancer deck deer desk dice diamond dinner
dish dog doll dome door dove dress driver drop drum duck dust ear earth egg eye fairy family fan farm father
fig finger fire fish flag flame flood floor flour flower fly fog food foot fork fox frame friend frog fruit
gate gem ghost giant gift giraffe girl glass globe glove glue goat gold goose grain grass gravel grove guard
guest hail hair hall hand handle hare harp hat hawk hay head heart hedge heel hen herb hero hill hip hive
hole home hood hook horn horse hose hospital hotel hound house ice inch ink inn iris ivy jar jam jaw jet
judge juice jump king kite knee knife knot lace lake lamb lamp land lark lawn leaf leather leg lens lid light
lily limb line lip loaf lobster lock log loom lunch lung maid mango map mask mast mat match meal meat melon
metal mile milk mill mint mist mole moon moose moss moth mother motor mountain mouse mouth mud mug muscle
mushroom nail neck nest net night nose nut oak oar oat onion orchard orchid organ otter oven owl ox paddle
page paint palace palm pan paper park path paw pea peach peak pear pebble pen penguin piano pie pig pigeon
pilot pin pine pipe pirate plane plant plate plough plum pocket poet pond pony pool porch port potato powder
prince puppet purse puzzle radio raft rail rain rat reed rice ring road robin robot rock roof room root rope
rose rug ruler sail sailor salad salmon salt sand scarf school screw sea seal seed shark shed sheep shell
ship shirt shoe shop shore shovel silk singer sink sister skate skirt skull sky sled smoke snail snake snow
soap sock soil soldier soup spark sparrow spoon spring square squirrel stable stair stamp star station steam
steel stem step stick stool store storm stove straw stream street string student sugar suit sun swamp swan
sweater sword tail tailor tank tape tea tent thief thread throne thumb ticket tile tin toad toast toe tomato
tongue tool tooth torch town toy track tractor trail train tray treasure tree truck trumpet trunk tulip
turkey turnip vase vest village vine voice wall wasp watch water wave wax weed well whale wheat wind wine
wing wire wolf woman wood wool worm wrist yard yarn zipper""".split()
ADJECTIVES = """golden broken frozen rapid bright narrow clever gentle open ancient quiet loud empty heavy
hidden simple plain dark small tall warm young early late distant brave calm dusty eager fancy happy jolly
kind lively mighty noble proud rusty shiny tiny upset vivid wild wooden zesty bitter crisp dull fresh grand
humble able angry awful bad bald basic big blind bold bored brief broad busy careful cheap civil clean clear
close cloudy common cool crazy cruel curious curly damp dear deep double dirty dizzy dry dumb easy elegant
equal exact faint fair false famous fast fat final fine firm flat foggy foolish foreign formal free friendly
full funny giant glad good great greedy guilty handsome handy hard healthy high hollow honest hot huge hungry
icy idle ideal inner jealous juicy large lazy lean lonely long lost lovely loyal lucky mad magic main mild
minor modern moist muddy naked nasty neat nervous new nice noisy odd oily old outer pale perfect pleasant
polite poor pretty pure quick rare raw ready real rich right rigid ripe rough royal rude sad safe salty scary
secret serious shallow sharp short shy sick silent silly single sleepy slim slow smart smooth soft solid sore
sour spare special stable steady steep sticky stiff strange strict strong stupid sudden sunny sweet swift
tame tasty tender thick thin thirsty tidy tight tired tough true ugly upper urban useful usual vast wavy weak
weary wet wicked wide wise wrong""".split()
COLORS = "red blue green yellow white black brown purple pink orange gray gold silver violet".split()
VERBS = """crosses paints closes reads watches moves keeps lifts builds carries follows cleans visits opens
finds holds leaves turns writes buys sells breaks draws hides asks brings burns calls catches chases chooses
climbs cooks counts covers cuts digs drives drops eats enters fears feeds fights fills fixes forgets gets
gives hates hears helps hits hunts joins kicks kisses knows likes loses loves makes marks meets misses mixes
needs passes picks pulls pushes rides rings saves sees sends serves shakes shows signs sings smells spends
steals stops takes teaches tells throws touches tries uses wants warms washes wears wins""".split()
PLACES = """under over behind near beside across around inside before after above below against beyond past
through toward with without""".split()
NAMES = """Jan Dora Finn Zoe Rob Ivy Gus Ada Max Nina Ben Carl Emil Fay Hugo Ida Kai Lena Mark Otto Rosa Sam
Tom Uma Vera Will Anna Bert Cleo Dan Eva Fred Gina Hana Igor Jack Kim Leo Mia Noah Olga Paul Ruth Sara Ted
Una Vic Wendy Yara Zack Abel Agnes Alan Alice Amir Amy Andy Arthur Barry Bella Bill Bob Boris Bruno Cara
Cathy Chen Chloe Chris Cora David Diana Don Doris Earl Edith Ella Elsa Erik Esther Ethan Felix Flora Frank
George Grace Greta Gwen Harry Heidi Helen Henry Iris Ivan Jane Jason Jill Jim Joan Joe John Jonas Julia June
Karen Kate Keith Ken Kira Kurt Lara Laura Liam Lily Linda Lisa Lola Lou Luis Luke Mario Mary Matt Maya Meg
Miguel Mike Mona Nadia Nancy Ned Nick Nils Noel Norman Oliver Omar Pam Pat Pedro Penny Phil Pia Polly Ralph
Ravi Ray Rex Rick Ron Roy Sally Sandra Sean Stella Steve Sue Susan Tanya Tara Theo Tina Tony Ursula Victor
Wanda Walter Wei Xena Yuri Yusuf Zeno""".split()
CITIES = """Oslo Riga Cairo Quito Bonn Lima Paris Rome Tokyo Delhi Seoul Berlin Madrid Vienna Prague Dublin
Athens Lisbon Warsaw Boston Denver Dallas Miami Sydney Nairobi Havana Kyoto Milan Accra Algiers Ankara
Atlanta Austin Baku Bali Bangkok Basel Beirut Bergen Bern Bogota Bombay Bremen Brussels Budapest Calgary
Chicago Cologne Dakar Damascus Detroit Dubai Florence Geneva Genoa Ghent Glasgow Hamburg Hanoi Helsinki
Houston Istanbul Jakarta Kiel Kiev Lagos Leeds Leipzig London Lyon Malmo Manila Memphis Minsk Montreal Moscow
Mumbai Munich Naples Nice Osaka Ottawa Oxford Perth Phoenix Pisa Porto Reno Rio Salem Seattle Seville Sofia
Tampa Tehran Toledo Tunis Turin Utrecht Venice Verona York Zagreb Zurich""".split()
COUNTRIES = """France Japan Peru Kenya Norway Egypt Chile India Spain Canada Brazil Poland Greece Cuba
Iceland Italy China Mexico Sweden Turkey Ghana Nepal Austria Denmark Finland Ireland Russia Sudan Vietnam
Portugal""".split()
LANGUAGES = """French German Spanish Latin Polish Greek Finnish Turkish English Italian Dutch Danish Arabic
Chinese Hindi Korean Swedish Russian""".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
LABELS = """passphrase|password|code word|secret word|door code|locker number|room number|key phrase|\
magic word|pin|meeting place|user name|favorite color|ticket number|order number|account name|safe code|\
project name|team name|license key|phone number|street name|shelf label|box number|code name|file name|\
gate code|wifi password|server name|account number|secret|number|code|word|name|token|key|answer|signal|\
badge number|lucky number|birthday|address|nickname|hotel|size|price|title|color|vault code|alarm code|\
train|flight|seat|weight|height|age|owner|boss|capital|city|deadline|date|time|speed|model|brand|version|\
label|tag|id|serial number|table number|bus line|platform|floor|car|pet|dog|cat|hobby|job|dish|drink|song|\
book|movie|game|team|sport|animal|tree|flower|fruit|food|prize|winner|leader|host|guest|driver|teacher|\
doctor|temperature|amount|total|score|rank|level|channel|port|path|folder|branch|command|topic|subject|\
theme|motto|slogan|greeting|rule|plan|goal|reason|result|value|symbol|letter|digit|sign|mark|stamp|seal|\
room|house|office|shop|street|station|airport|bridge|island|river|mountain|country|language|month|day|hour|\
bank|invoice|contract|case number|reference|queue|slot|recipe|ingredient|material|shape|sound|smell|taste|\
contact|email|website|domain|login|hint|clue|riddle|map|combination|access code|entry code|zip code|\
postal code|area code|bus number|flight number|gate|terminal|parking spot|desk|chair|locker|drawer|shelf|\
box|bag|coat size|shoe size|blood type|star sign|middle name|last name|first name|maiden name|stage name|\
pen name|screen name|product key|promo code|coupon|discount|budget|salary|rent|fee|fine|tip|tax""".split("|")
OWNERS = """car|dog|cat|house|garden|team|school|office|kitchen|boat|bike|shop|hotel|company|project|printer|\
server|computer|phone|door|gate|safe|box|room|club|band|ship|train|trip|party|meeting|course|test|game|\
book|song|film|cake|soup|horse|bird|baby|teacher|doctor|boss|neighbor|guest|driver|captain|king|queen|\
class|library|museum|market|station|bank|farm|factory|lab|kit|set|pack|main hall|front door|back door|\
blue house|old mill|new car|first floor|second room|north wing""".split("|")
SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
ONSETS = """b c d f g h j k l m n p qu r s t v w x y z bl br ch cl cr dr fl fr gl gr pl pr sc sh sk sl sm sn
sp st str sw th tr tw""".split()
ENDS = "b d f l ll m n nd ng nk p r rd rk rn rt s sh sk ss st t th x".split() + [""] * 22

# ---- what is said before, between and after: sentences that mean nothing

PHRASES = {
    "np": "[the|the|a|a|this|that|every|my|your|his|her|our|their|one|some|no|another] [|{a} |{a} |{a} {a} "
    "]{n}",
    "someone": "[{who}|{who}|{who}|he|she|nobody|somebody|{who} and {who}|my {kin}|the {job}|{np}]",
    "kin": "[mother|father|brother|sister|aunt|uncle|cousin|friend|neighbor|boss|son|daughter|wife|husband]",
    "job": "[doctor|teacher|driver|baker|farmer|pilot|singer|writer|painter|cook|judge|guard|nurse|clerk]",
    "when": "[today|yesterday|tomorrow|every day|at night|in the morning|in {month}|on {day}|at noon|"
            "last week|next year|at {two} o'clock|for {two} days|since {month}|once|twice|sometimes|often|"
            "{two} years ago|before lunch|after dinner|in winter|all summer|now and then|later|again]",
    "where": "[in {city}|in {country}|at home|at school|{p} {np}|{p} {np}|here|there|at the {n}|on the {n}|"
             "in the {n}|far away|upstairs|outside|on page {two}|in room {two}]",
    "past": "[saw|met|had|lost|found|sold|bought|took|made|left|read|wrote|cut|broke|ate|drew|built|forgot|"
            "wanted|liked|painted|carried|followed|opened|closed|moved|watched|washed|visited|remembered]",
    "will": "[will|can|may|must|should|could|would|might|did not|does not|will not|cannot|used to]",
    "do": "[see|meet|have|lose|find|sell|buy|take|make|leave|read|write|cut|break|eat|draw|build|forget|want|"
          "like|paint|carry|follow|open|close|move|watch|wash|visit|bring|push|pull|lift|fix|hide|keep]",
    "clause": "[{someone} {v} {np}|{someone} {past} {np}|{someone} {will} {do} {np}|{np} [is|was|looks|seems|"
              "became|feels|stays|gets] {a}|{someone} {v} {np} {where}|{someone} {past} {np} {when}|"
              "there [is|was] {np} {where}|there are {two} {a} {n}s {where}|{someone} [goes|went|came|comes|"
              "walks|walked|runs|ran|drove|flew|moved|returned] to [{city}|{country}|{np}] [by {n}|{when}|"
              "alone]|"
              "it [is|was|gets] {a} {where}|{someone} [sleeps|slept|waits|waited|sings|sat|stood|lives|"
              "lived|works|worked|plays|stays] {where}]",
}
FILLER = [
    "{clause}.", "{clause}.", "{clause}.", "{clause}.",
    "{clause}, [and|but|so|because|while|although|or] {clause}.",
    "[If|When|While|Because|After|Before|Since|As] {clause}, {clause}.", "{when}, {clause}.",
    "[Then|So|Still|Maybe|Perhaps|However|Therefore|Also|Suddenly|Finally|Meanwhile|Of course|In fact], "
    "{clause}.",
    "{who} [says|thinks|knows|hopes|believes|said|writes|dreams|is sure] that {clause}.",
    "[What|Such] a {a} {n}!", "Is {np} {a}? [Nobody knows.|Maybe.|Who can tell.|Not really.|It is.]",
    "Nobody [in {city}|here|there] knows why {clause}.", "The train to {city} leaves at {two}:{two}.",
    "The price of a {n} is {two} or {two}.",
    "[I|We|They|{who}] [like|likes|love|need] {np} because {clause}.",
    "We had {n} and {n} for lunch.", "{n}, {n}, {a}, {odd}.", "Chapter {two}: {np} of {who}.",
    "{who}: \"{clause}.\"", "[Once upon a time|Long ago|Some say that|I heard that|It seems that] {clause}.",
    "{odd} [{v}|and|is not|means|was] {odd}.", "[Do|Did|Can|Will] you {do} {np}?",
    "[Please|Never|Always] {do} {np}.",
    "Between {city} and {city} {clause}.", "[More|Less|Fewer] than {two} {n}s [were|are] {a}.",
    "[The {n}|{who}], who {v} {np}, {v} {np}.", "It [takes|took] {two} minutes to {do} {np}.",
    "You [should|could|must] {do} {np} {where}.", "[Yes|No|Well|Oh], {clause}.",
    "[Some|Most|Many|All|Few] {n}s "
    "[are|were|become|look|taste] {a}.", "{np} and {np} [are|were] {a}.", "[How|Why] {a} {np} [is|was]!",
    "The {n} of {city} is {a}er than {np}.", "[My|Our|Her|His] {kin} {v} {np} {when}.",
    "{np} {p} {np} {v} {np}.",
]


def fill(template: str, rng: random.Random, **values: str) -> str:
    """The template with one alternative for each [a|b], a value or a random word for each {place}."""
    while "[" in template:
        template = re.sub(r"\[([^\[\]]*)\]", lambda options: rng.choice(options[1].split("|")), template)

    def word(place):
        kind = place[1]
        if kind in values:
            return values[kind]
        if kind in PHRASES:
            return fill(PHRASES[kind], rng)
        if kind == "two":
            return str(rng.randrange(2, 100))
        return odd_word(rng) if kind == "odd" else rng.choice(WORDS[kind])
    return re.sub(r"\{(\w+)\}", word, template)


def odd_word(rng: random.Random) -> str:
    """A word that nobody knows: plain syllables, or any."""
    if rng.random() < .5:
        word = "".join(rng.choice(SYLLABLES) for _ in range(rng.choice((2, 2, 3))))
        return word + rng.choice(("", "n", "r"))
    return "".join(rng.choice(ONSETS) + rng.choice("aeiou") + rng.choice(ENDS)
                   for _ in range(rng.choice((1, 2, 2))))


def filler(rng: random.Random, sentences: int) -> List[str]:
    return [upper_first(fill(rng.choice(FILLER), rng)) for _ in range(sentences)]


def upper_first(text: str) -> str:
    return text[:1].upper() + text[1:]


def words(rng: random.Random) -> str:
    """One to three words."""
    return fill("[{n}|{a} {n}|{a} {n}|{n} {n}|{n} {n} {n}|{a} {a} {n}|{color} {n}|{who}|{city}|{a}|{odd}|"
                "{odd} {n}|{n} of {n}|{color}]", rng)


def secret(rng: random.Random) -> str:
    """Something worth remembering: words, made-up words, numbers, codes."""
    kind = rng.random()
    if kind < .45:
        return words(rng)
    if kind < .53:
        return fill(rng.choice(("{n}-{n}", "{a}-{n}", "{n}{two}", "{n}-{two}", "{n}_{n}", "{odd}-{two}",
                                "{n}.{n}", "{odd}@{n}.com", "{two}:{two}", "{month} {two}", "{two} {n}s")),
                    rng)
    if kind < .68:
        return " ".join(odd_word(rng) for _ in range(rng.choice((1, 1, 2))))
    if kind < .85:
        return number(rng)
    signs = string.ascii_uppercase + string.digits
    letters = "".join(rng.choice(signs) for _ in range(rng.choice((3, 4, 5, 6))))
    return letters if rng.random() < .5 else letters[:2] + "-" + letters[2:]


def number(rng: random.Random) -> str:
    digits = rng.choice((1, 2, 3, 4, 4, 5, 6))
    whole = str(rng.randrange(10 ** (digits - 1), 10 ** digits))
    return whole + f".{rng.randrange(10)}" if rng.random() < .1 else whole


# ---- facts: a label and what it stands for

PHRASES |= {
    "be": "[is|is|is|is|was|will be|equals|remains|reads|became|shall be|is set to|was set to|has been|"
          "must be|should be|stays|means|is now|is still|is called|has become|turns out to be|happens to be]",
    "told": "[||||remember: |remember that |please remember that |please remember: |note: |note that |"
            "keep in mind that |do not forget: |don't forget that |please note that |you should know that |"
            "by the way, |just so you know, |FYI, |for the record, |important: |attention: |one thing: |"
            "also, |as {who} said, |{who} told me that |{who} says that |it is {a}, but |I heard that |"
            "mark this: |for later: |listen, |here is a fact: |learn this: |let me tell you that |okay, |"
            "first of all, |between us, |to be clear, |in short, |as agreed, |I repeat: |this matters: ]",
    "end": "[.|.|.|.|.|.|!|, okay?|, please remember.|, and nothing else.|, do not forget it.|, for now.|"
           "; keep it.|. Remember it.|. Do not lose it.|, that is all.|, you see.|. Got it?|;|,|]",
    "they": "[I|we|they|you|{who}|the {job}|my {kin}|someone]",
    "settled": "[set|changed|put|moved|switched|updated|turned|reset|renamed|corrected]",
}
# {L} comes with its article, {l} without
STATEMENTS = [
    "{told}{L} {be} {S}{end}", "{told}{L} {be} {S}{end}", "{told}{L} {be} {S}{end}", "{L} {be} {S}{end}",
    "{L} is {S}.", "{L} is {S}.", "{l}: {S}", "{l}: {S}.", "{l} = {S}", "{l} {S}{end}", "[-|*] {l}: {S}\n",
    "{l} [-|->|=>|==|:=] {S}", "({l}: {S})", "{told}{they} {settled} {L} to {S}{end}",
    "{told}{S} [is|is|is now|was|will be|became|serves as|was chosen as|works as] {L}{end}",
    "[use|take|I use|we use|they took|I chose|{who} chose|we picked|we have|choose|keep|I want|they made] "
    "{S} as {L}{end}", "[with|given] {S} as {L}, {clause}.",
    "[write down|save|store|keep|record|memorize|learn|note|remember|take down] {L}[:|,|: it is| as|:] "
    "{S}{end}",
    "[write down|save|store|record|remember] this {l}: {S}{end}", "{told}let {L} be {S}{end}",
    "[here|this|below] is {L}: {S}{end}",
    "{told}{L}, [by the way|you know|as agreed|of course|I think], is {S}{end}",
    "for {L} [use|take|type|say|enter|we have|I chose|pick|we took] {S}{end}",
    "as for {L}[, it is|, use|, take|, we have|:] {S}{end}",
    "{L} [that we use|you need|for today|from now on|that I chose] {be} {S}{end}",
    "{told}if [they|someone|anybody] [asks|asked] for {L}, [say|it is|tell] {S}{end}",
    "{told}{they} [call|calls|called|know|named] {L} {S}{end}", "{told}{L}? [It is|It was|That is] {S}{end}",
    "{S}: that [is|was|will be] {L}{end}", "{told}{they} [got|have|gave|found|took] {S} for {L}{end}",
]
QUESTIONS = [
    "what [is|is|is|is|was] {L}[?|?|?| again?|, please?| now?|]", "what is {L}?", "what is {L}?",
    "[tell|give|show|send] me {L}[.| again.|, please.| now.|]",
    "[do|can|could|would|will] you [remember|recall|repeat|say|tell me|give me|name|know|find|write] {L}"
    "[?| for me?| again?|, please?|]",
    "[which|what] {l} did I [give you|tell you|mention|say|set|note|name]?",
    "I [forgot|need|lost|want|do not remember|am looking for|would like] {L}[.|. What was it?|; tell me.|"
    ". Can you help?|, please.]", "[and|so|now|then|what about|well, what about|how about] {L}?",
    "[please |now |][repeat|say|name|write|recall|state|spell|print|read out|type|return|find|report|"
    "quote] {L}[.|, please.| for me.| once more.|]", "remind me of {L}[.|, please.]",
    "remind me what {L} [is|was].",
    "{l}?", "{L}[?|, please.|, please?|]", "what did I [say|tell you] {L} [is|was]?",
    "what do you [know|remember] about {L}?",
    "what [should|do|must|can] I [use|type|enter|say|give] [as|for] {L}?",
    "[someone|{who}] asks for {L}. What [do you say|is it]?", "how does {L} [read|go]?", "which is {L}?",
    "[is there|did I mention|have I told you|did I tell you] {L}?",
    "[answer with|look up|go back and find] {L}.",
    "what [has|had] {they} [told|said] about {L}?", "[what was that|which was] {l} again?", "what {be} {L}?",
]
LEAD_INS = [
    "", "", "", "", "", "", "", "Okay. ", "Now: ", "So, ", "Thanks. ", "Good. ", "One question: ", "Well, ",
    "Listen. ",
    "Please, ", "Hey, ", "Question: ", "Right. ", "Now tell me: ", "A question. ", "Next: ", "And ", "But ",
    "Fine. ",
]
OPENERS = [
    "", "", "", "", "", "", "Hello! ", "Hi. ", "Please read this. ", "Here is a story. ", "Some notes: ",
    "Read on. ",
    "Good morning. ", "This is a text:\n", "Text: ", "Dear model, ",
]


def label(rng: random.Random) -> str:
    """'door code', or whose: 'door code for Jan', 'Jan's door code'."""
    made_up = "[{n} code|{n} number|{n} word|{a} {n}|{odd} code|{n} {n}|{n}|{color} {n}|{odd}]"
    plain = rng.choice(LABELS) if rng.random() < .65 else fill(made_up, rng)
    kind = rng.random()
    if kind < .45:
        return plain
    if kind < .55:
        return f"{rng.choice(NAMES)}'s {plain}"
    return f"{plain} {rng.choice(('for', 'of', 'for', 'in' if kind < .65 else 'of'))} {owner(rng)}"


def owner(rng: random.Random) -> str:
    if rng.random() < .4:
        return rng.choice(NAMES)
    return fill(rng.choice(("{city}", "the {n}", "room {two}", "the {a} {n}", "the {owned}", "my {owned}",
                            "the {job}", "{country}", "{odd}", "my {kin}", "{day}", "{who} and {who}")), rng)


def labels(rng: random.Random, n: int) -> List[str]:
    """n labels; often of one kind, so that only their owners tell them apart."""
    kind = rng.random()
    if n > 1 and kind < .55:
        plain = rng.choice(LABELS) if rng.random() < .8 else rng.choice(NOUNS)
        owners = rng.sample(rng.choice((NAMES, NAMES, NAMES, CITIES, NOUNS)), n)
        middle = rng.choice((" for ", " for ", " of ", " for the ", "'s ", " in "))
        return [f"{one}'s {plain}" if middle == "'s " else f"{plain}{middle}{one}" for one in owners]
    if n > 1 and kind < .65:
        whose = owner(rng)
        return [f"{plain} of {whose}" for plain in rng.sample(LABELS, n)]
    found: List[str] = []
    while len(found) < n:
        new = label(rng)
        if all(new != old and new not in old and old not in new for old in found):
            found.append(new)
    return found


def with_article(name: str, article: str = "the") -> str:
    return name if "'s " in name else f"{article} {name}"


def about(template: str, name: str, rng: random.Random, **values: str) -> str:
    """A sentence or question about a label."""
    article = rng.choice(("the", "the", "the", "the", "the", "my", "our", "your"))
    return upper_first(fill(template, rng, L=with_article(name, article), l=name, **values))


def statement(name: str, value: str, rng: random.Random) -> str:
    return about(rng.choice(STATEMENTS), name, rng, S=f'"{value}"' if rng.random() < .06 else value)


def in_one_sentence(first: str, second: str, rng: random.Random) -> str:
    middle = rng.choice((", and ", " and ", "; ", ", while ", ", but ", ", "))
    return first.rstrip(".!;,\n") + middle + second[:1].lower() + second[1:]


def fact_turn(name: str, value: str, rng: random.Random) -> Tuple[str, str, str]:
    """-> question, thought, answer."""
    question = rng.choice(LEAD_INS) + about(rng.choice(QUESTIONS), name, rng)
    named = with_article(name)
    return question, f"I look for {named}.", f"{upper_first(named)} is {value}."


# ---- order

PHRASES |= {
    "listed": "[saw|met|bought|found|heard|painted|took|read|visited|counted|sold|packed|passed|named|drew|"
    "tried]",
    "list": "[order|list|sequence|row|line|queue|plan|program|menu|series|route|schedule|ranking]",
    "things": "[winners|guests|stops|stations|players|words|items|things|entries|names|steps|visitors|parts]",
    "thing": "[thing|item|word|name|entry|one|one|one|stop|guest|element|part]",
    "came": "[came|comes|was|is|stood|went|arrived|appeared]",
    "right": "[right |right |directly |immediately |just ||]",
}
LIST_INTROS = [
    "[I|we|they|{who}|she|he] {listed} ", "[I|we|they|{who}|she|he] {listed} ", "first came ", "in order: ",
    "[my|our|the|a|this|today's] {list}: ", "the {list} [is|was] ", "[here|this] is the {list}: ",
    "remember [this|the] {list}: ", "[on|under|near|behind] the {n} [there were|are|I saw|stood|lay] ",
    "they came [in this order|one by one|in a row|one after another]: ",
    "[today|yesterday|on {day}] [came|we had|"
    "there was|I saw] ", "the {things} [are|were|are these:|in order:] ", "from [left to right|top to bottom|"
    "start to end|small to big]: ", "one after the other: ", "at the {n} [stood|waited|came|sat] ",
    "the [train|bus|ship|{job}] [passed|visited|brought|took] ", "it [starts|begins|began] with ", "",
]
JOINS = [", ", ", ", ", ", ", then ", ", then ", "; ", " and ", ", and then ", " then ", ", after that ",
         ", followed by ", ", next ", " > ", " -> ", ", later ", " / ", ", and after it ", ". Then ",
         " and then ", "\n",
         "\n- ", ". After that ", ", next came "]
LAST_JOINS = [" and ", ", and ", " and finally ", ", and last ", ", and then ", ", then ", ", finally "]
NUMBERED = ["{i}. ", "{i}) ", "({i}) ", "step {i}: ", "number {i}: ", "{o}: ", "{o} ", "{o} the ",
            "{o} came ", "{i} "]
ORDINALS = ["first", "second", "third", "fourth", "fifth"]
ORDER_QUESTIONS = [
    "[which|what|which one|which {thing}] {came} [the ||]{o}[?|?| in the {list}?| of them?|]",
    "what was {o}?", "which one {came} {o}?", "[what|which] {came} [the |in ]{o} [{thing}|place]?",
    "[tell|give] me the {o} [{thing}|of the {list}|].",
    "[name|say|repeat|recall] the {o}[.| {thing}.| of them.]",
    "the {o} {thing}[?|, please.]", "what did [I|they|we] [name|list|mention|say|have] {o}?",
    "which {thing} [did I name|was named|was listed|was mentioned|is in the {list}] {o}?",
    "[do you remember|I forgot|I want|what is|what was] the {o} {thing}[?|.]", "and the {o}?", "{o}?",
]
AFTER_QUESTIONS = [
    "[what|which one|which {thing}|which|who] {came} {right}after {x}?", "what {came} {right}after {x}?",
    "[what|which|which {thing}] [follows|followed|comes behind] {x}?",
    "[and|then|what|and then] {right}after {x}?",
    "[tell me|say|name] [what|the {thing} that|which one] {came} {right}after {x}.",
    "after {x}[, what came next|, which one|, what|, which {thing}]?", "what {came} next after {x}?",
    "what [do I find|did I name|did they have|is listed] {right}after {x}?", "the {thing} {right}after {x}?",
]


def ordered(rng: random.Random) -> Tuple[str, List[str]]:
    """-> a sentence with an ordered list, the items."""
    pool = rng.choice((NOUNS, NOUNS, NOUNS, NAMES, CITIES, ADJECTIVES, COLORS, None))
    n = rng.choice((3, 3, 4, 4, 5))
    items = rng.sample(pool, n) if pool else [odd_word(rng) for _ in range(n)]
    article = rng.choice(("", "", "a ", "the ", "my ", "one ")) if pool is NOUNS else ""
    told = [article + item for item in items]
    if rng.random() < .25:
        mark, join = rng.choice(NUMBERED), rng.choice((" ", ", ", "\n", "; ", ". "))
        text = join.join(mark.format(i=i + 1, o=ORDINALS[i]) + item for i, item in enumerate(told))
    else:
        join = rng.choice(JOINS)
        last = join if rng.random() < .6 else rng.choice(LAST_JOINS)
        text = join.join(told[:-1]) + last + told[-1]
    intro = fill(rng.choice(LIST_INTROS), rng)
    return upper_first(intro + text + rng.choice((".", ".", ".", "!", "\n"))), items


def order_turn(items: List[str], rng: random.Random) -> Tuple[str, str, str]:
    lead = rng.choice(LEAD_INS)
    if rng.random() < .55:
        i = rng.randrange(min(len(items), 4))
        question = upper_first(fill(rng.choice(ORDER_QUESTIONS), rng, o=ORDINALS[i]))
        return lead + question, f"I look for the {ORDINALS[i]} one.", f"The {ORDINALS[i]} was {items[i]}."
    i = rng.randrange(len(items) - 1)
    asked = items[i] if rng.random() < .75 else f"the {items[i]}"
    question = upper_first(fill(rng.choice(AFTER_QUESTIONS), rng, x=asked))
    return lead + question, f"I look for {items[i]}.", f"Right after {items[i]} came {items[i + 1]}."


# ---- tools

class Tool:
    """A function's name, what it is for, its parameters as (name, type), and how people ask for it."""
    def __init__(self, name: str, purpose: str, parameters: List[Tuple[str, str]], asks: List[str] = ()):
        self.name, self.purpose, self.parameters, self.asks = name, purpose, parameters, list(asks)
        self.described = self.known_by_purpose = False      # parameters with a text; asked for by its purpose
        self.plain = False                                  # all of it goes together

    def schema(self, rng: random.Random) -> dict:
        """In OpenAI form; descriptions, required and such come and go."""
        properties = {}
        for name, kind in self.parameters:
            properties[name] = {"type": kind}
            if self.described:
                properties[name]["description"] = fill(
                    "[The {k}.|{k} of the {n}|The {a} {k}|Which {k}|The {k} to {verb}]", rng,
                    k=name.replace("_", " "))
        parameters = {"type": "object", "properties": properties}
        if rng.random() < .8:
            parameters["required"] = [name for name, _ in self.parameters]
        function = {"name": self.name}
        if self.known_by_purpose or rng.random() < .75:
            function["description"] = self.purpose
        return {"type": "function", "function": function | {"parameters": parameters}}


KNOWN_TOOLS = [
    ("get_weather", "Get the weather in a city.", "city:string", [
        "[What|How] is the weather in {city}?", "Weather in {city}, please.", "How is it outside in {city}?",
        "[Is it raining|Will it rain|Is it sunny|Is it cold|Does it snow] in {city}?"]),
    ("weather", "Weather for a place and a day.", "city:string day:integer", [
        "What is the weather in {city} on day {day}?", "Weather for {city}, day {day}.",
        "How will the weather in {city} be on day {day}?", "On day {day}, will it rain in {city}?"]),
    ("get_time", "Current time in a city.", "city:string", [
        "What time is it in {city}?", "Tell me the time in {city}.", "How late is it in {city}?"]),
    ("send_email", "Send an email.", "to:string subject:string", [
        "Send an email to {to} about {subject}.", "Write to {to} about {subject}.",
        "Email {to}: {subject}.", "Mail {to} that {subject} is done."]),
    ("search", "Search the web.", "query:string", [
        "Search for {query}.", "Look up {query}.", "Find {query} on the web.", "[Google|Search] {query}",
        "Please search the web for {query}.", "What does the web say about {query}?"]),
    ("set_timer", "Start a timer.", "minutes:integer", [
        "Set a timer for {minutes} minutes.", "Start a timer of {minutes} minutes.",
        "Timer: {minutes} minutes.", "Wake me in {minutes} minutes.", "Ring in {minutes} minutes."]),
    ("add", "Add two numbers.", "a:number b:number", [
        "Add {a} and {b}.", "What is {a} plus {b}?", "Compute the sum of {a} and {b}.", "{a} + {b}?"]),
    ("multiply", "Multiply two numbers.", "a:number b:number", [
        "Multiply {a} by {b}.", "What is {a} times {b}?", "{a} * {b}?"]),
    ("subtract", "Subtract b from a.", "a:number b:number", ["What is {a} minus {b}?", "{a} - {b}?"]),
    ("divide", "Divide a by b.", "a:number b:number", ["Divide {a} by {b}.", "What is {a} over {b}?"]),
    ("book_hotel", "Book a hotel room.", "city:string nights:integer", [
        "Book a hotel in {city} for {nights} nights.", "I need a room in {city} for {nights} nights."]),
    ("translate", "Translate a text.", "text:string language:string", [
        "Translate {text} into {language}.", "How do you say {text} in {language}?",
        "What is {text} in {language}?", "Say {text} in {language}."]),
    ("play_music", "Play a song.", "title:string", [
        "Play {title}.", "I want to hear {title}.", "Put on {title}.", "Let me hear {title}."]),
    ("find_flight", "Find a flight.", "origin:string destination:string", [
        "Find a flight from {origin} to {destination}.", "I want to fly from {origin} to {destination}.",
        "Fly me from {origin} to {destination}.", "From {origin} to {destination} by plane, please."]),
    ("light", "Switch a light.", "room:string on:boolean", [
        "Set the light in the {room} to {on}.", "Light in the {room}: {on}."]),
    ("read_file", "Read a file.", "path:string", [
        "Read the file {path}.", "Open {path}.", "Show me {path}.", "What is in {path}?"]),
    ("create_note", "Write a note.", "title:string text:string", [
        "Make a note called {title}: {text}.", "Write a note {title} that says {text}."]),
    ("stock_price", "Price of a stock.", "symbol:string", [
        "What is the price of {symbol}?", "How much is {symbol} stock?", "Price of {symbol}?"]),
    ("call_contact", "Call somebody.", "person:string", ["Call {person}.", "Ring up {person}.",
    "Phone {person}."]),
    ("remind_me", "Set a reminder.", "text:string hour:integer", [
        "Remind me of {text} at {hour}.", "At {hour} remind me about {text}."]),
    ("send_money", "Send money to a person.", "person:string amount:number", [
        "Send {amount} to {person}.", "Pay {person} {amount}.", "{person} gets {amount} from me."]),
    ("order_food", "Order food.", "dish:string count:integer", [
        "Order {count} {dish}.", "I want {count} {dish} to eat.", "Bring me {count} {dish}."]),
    ("convert_money", "Convert money between currencies.", "amount:number currency:string", [
        "How much is {amount} in {currency}?", "Convert {amount} to {currency}.",
        "Change {amount} into {currency}."]),
    ("set_temperature", "Set the temperature of a room.", "room:string degrees:integer", [
        "Heat the {room} to {degrees}.", "Make the {room} {degrees} degrees.",
        "{degrees} degrees in the {room}."]),
    ("distance", "Distance between two cities.", "origin:string destination:string", [
        "How far is it from {origin} to {destination}?", "Distance from {origin} to {destination}."]),
    ("define", "Meaning of a word.", "word:string", [
        "Define {word}.", "What does {word} mean?", "Meaning of {word}?"]),
    ("add_to_cart", "Put a product into the cart.", "product:string count:integer", [
        "Put {count} {product} into the cart.", "I buy {count} {product}.",
        "Add {count} {product} to my cart."]),
    ("delete_file", "Delete a file.", "path:string", ["Delete {path}.", "Remove the file {path}."]),
    ("lock_door", "Lock a door.", "room:string", ["Lock the door of the {room}.", "Lock the {room}."]),
    ("book_table", "Book a table in a restaurant.", "place:string people:integer", [
        "Book a table at {place} for {people} people.", "A table for {people} at {place}, please."]),
]
TOOL_VERBS = """get find list make send show open start stop check count read set move save load book call
pick sort update delete create fetch add ask buy cancel change clear close compare copy cut draw edit empty
fill fix give grab hide join keep lock look merge order paint pay plan play post print pull push put remove
rename rent repair reset ring run search sell share sign split store switch take teach tell test track turn
unlock upload use view wash watch write""".split()
TOOL_NOUNS = """movie news alarm order photo user game song recipe map ticket bank score taxi train pizza
joke diary radio robot stock chart page table label item task event report message file team city street
camera printer door lamp garden market rocket engine letter button kitten planet account address balance bill
booking calendar contact course device document draft folder goal group hotel image invoice job key language
lesson light list log meal meeting menu note number office package parcel password payment person phone place
plan player playlist post price product profile project question quote record reminder room route rule seat
sensor server session shop sign status step story subject sum tag timer token tool tour trip video volume
weather website window word""".split()
PARAMETERS = {
    "string": """name title text city color label team street query symbol language person place subject food
    genre path note reason country author topic kind word message room product dish song artist file folder
    user target source animal plant shop day month status device answer line brand code owner category style
    content key value item tag recipient sender city place person""".split(),
    "integer": """count page day limit year id hour size level nights rank index number people minutes seconds
    floor age amount seats copies steps points degrees quantity""".split(),
    "number": "price weight amount speed width height score ratio length depth distance a b x y total "
    "rate".split(),
    "boolean": "urgent open quiet fast on active public dark loud".split(),
}
CALL_PHRASES = [
    "[|Please |Now |Okay, ][use|call|run|take|start|try|execute|apply] {t}[: | with | for | and give it | "
    "on ]{args}.",
    "[Use|Call|Run|Take] the [tool|function|command] {t}[: | with | and set ]{args}.", "{t}: {args}",
    "{t} {args}",
    "{t}({args})", "I [need|want|would like] {t} with {args}.", "With {args}[, call|, run|, use| call] {t}.",
    "[Can|Could|Would|Will] you [use|call|run|try] {t} [for|with] {args}?", "Now {t} with {args}, please.",
    "[Take|Given|For] {args} [and call|and run|, use] {t}.", "I want you to [call|use|run] {t} with {args}.",
    "[Let us|We should|It is time to] [use|call|run] {t}: {args}.", "{t} please, {args}.", "{args}: {t}",
    "[A|One] call of {t}, {args}.", "What does {t} [give|say|return] for {args}?", "Ask {t}: {args}.",
]
WORDY_PHRASES = [       # the tool's name as words, or its purpose
    "[Please |Now |]{w}[: |, | with ]{args}.", "{W} with {args}.",
    "I [want|need|would like|have] to {w}, {args}.",
    "[Can|Could|Would] you {w}[ for me|]? {args}.", "{W}[, |: ]{args}.", "Help me [to |]{w}: {args}.",
    "[Let us|Let's|We should] {w}, {args}.", "It is time to {w}. {args}.", "How about {w}? {args}.",
]
ARGUMENT_FORMS = ["{k} {v}", "{k} {v}", "{k} = {v}", "{k}={v}", "{k}: {v}", "the {k} is {v}", "{v} as {k}",
                  "{k} is {v}", "{v} for {k}", "{k} set to {v}", "the {k} {v}", "{v} as the {k}",
                  "{k} should be {v}", '{k} "{v}"']
POOLS = {"city": CITIES, "country": COUNTRIES, "color": COLORS, "language": LANGUAGES, "day": DAYS,
         "month": MONTHS, "person": NAMES, "to": NAMES, "user": NAMES, "recipient": NAMES, "sender": NAMES,
         "owner": NAMES, "author": NAMES, "artist": NAMES}
# without the names of parameters: how a value of that kind is said
NATURAL = {
    "city": "[in|for|at|near] {v}", "place": "[in|at|near|to] {v}", "country": "in {v}",
    "street": "[in|on] {v}",
    "person": "[for|to|with|from] {v}", "to": "to {v}", "user": "[for|of] {v}", "recipient": "to {v}",
    "sender": "from {v}", "owner": "of {v}", "author": "by {v}", "artist": "by {v}",
    "name": "[named|called] {v}",
    "language": "[in|into] {v}", "day": "on [|day ]{v}", "month": "in {v}", "hour": "at {v}",
    "year": "[in|of] {v}",
    "path": "[from|in|at] {v}", "source": "from {v}", "target": "to {v}", "room": "in the {v}",
    "title": "[called|] {v}",
    "subject": "about {v}", "topic": "[about|on] {v}", "reason": "because of {v}", "color": "in {v}",
    "query": "[for|] {v}",
    "price": "for {v}", "amount": "[of|for] {v}", "product": "[of|] {v}", "message": "saying {v}",
    "text": "[saying|] {v}",
}
NATURAL_NUMBER = "[{v} {k}s|for {v} {k}s|of {v} {k}s|with {k} {v}|to {v}|{v}|on {k} {v}]"
NATURAL_WORD = "[for|with|about|of|on|as|called|] {v}"


def tool_value(key: str, kind: str, rng: random.Random):
    """A value of a parameter; now and then one that goes with its name."""
    if kind == "string":
        if key in POOLS and rng.random() < .7:
            return rng.choice(POOLS[key])
        pick = rng.random()
        if pick < .3:
            return rng.choice(rng.choice((NOUNS, NAMES, CITIES, ADJECTIVES)))
        return secret(rng) if pick > .75 else words(rng)
    if kind == "integer":
        return rng.randrange(1, 10 ** rng.choice((1, 2, 2, 3, 3, 4)))
    if kind == "number":
        if rng.random() < .6:
            return rng.randrange(1, 1000)
        return rng.randrange(1, 10000) / rng.choice((10, 100))
    return rng.random() < .5


def made_up_name(rng: random.Random) -> str:
    pick, verb = rng.random(), rng.choice(TOOL_VERBS)
    noun, other = rng.choice(TOOL_NOUNS if rng.random() < .5 else NOUNS), rng.choice(TOOL_NOUNS)
    if pick < .6:
        return rng.choice((f"{verb}_{noun}", f"{verb}_{noun}", f"{verb}_{noun}", f"{noun}_{verb}",
                           f"{verb}_{rng.choice(ADJECTIVES)}_{noun}", f"{verb}{upper_first(noun)}",
                           f"{verb}-{noun}", f"{verb}_{noun}_{other}"))
    if pick < .75:
        return rng.choice((noun, f"{noun}_{other}"))
    return rng.choice(("_", "_", "-", "")).join(odd_word(rng) for _ in range(rng.choice((1, 1, 2))))


def made_up_tool(rng: random.Random) -> Tool:
    kinds = rng.choices(("string", "integer", "number", "boolean"), (5, 2, 1, .4),
                        k=rng.choice((1, 1, 1, 2, 2, 2, 3)))
    parameters: List[Tuple[str, str]] = []
    for kind in kinds:
        key = rng.choice(PARAMETERS[kind] if rng.random() < .8 else NOUNS)
        if rng.random() < .1:
            key = rng.choice((f"{key}_{rng.choice(TOOL_NOUNS)}", f"{rng.choice(ADJECTIVES)}_{key}"))
        if rng.random() < .04:
            key = odd_word(rng)
        if key not in [k for k, _ in parameters]:
            parameters.append((key, kind))
    to_do = rng.random() < .7
    purpose = ("{verb} [the {n}|the {a} {n}|{n}s|a {noun}|the {noun}|{noun}s of the {n}]" if to_do else
               "[handles a {a} {n}|a tool for {n}s]")
    tool = Tool(made_up_name(rng), upper_first(fill(purpose + "[.|.|]", rng)), parameters)
    tool.known_by_purpose = to_do and rng.random() < .25
    return tool


def plain_tool(rng: random.Random) -> Tool:
    """As people make them: the purpose says what the name says, and the parameters are the usual ones."""
    verb, noun = rng.choice(TOOL_VERBS), rng.choice(TOOL_NOUNS if rng.random() < .6 else NOUNS)
    kinds = rng.choices(("string", "integer", "number", "boolean"), (5, 2, 1, .3),
                        k=rng.choice((1, 1, 2, 2, 3)))
    parameters = {rng.choice(PARAMETERS[kind]): kind for kind in kinds}
    name = fill("[{do}_{what}|{do}_{what}|{do}_{what}|{what}|{do}_{a}_{what}]", rng, do=verb, what=noun)
    purpose = fill("[{do} [a|the] {what}|{do} {what}s|{do} one {what}|tool to {do} a {what}]"
                   "[| by {k}| with a {k}| for a {k}][.|.|]", rng, do=verb, what=noun,
                   k=next(iter(parameters)))
    tool = Tool(name, upper_first(purpose), list(parameters.items()))
    tool.plain = True
    return tool


def known_tool(rng: random.Random) -> Tool:
    name, purpose, parameters, asks = rng.choice(KNOWN_TOOLS)
    return Tool(name, purpose, [tuple(p.split(":")) for p in parameters.split()], asks)


def toolbox(rng: random.Random, n: int, plain: bool) -> List[Tool]:
    tools: List[Tool] = []
    described = rng.random() < .3
    while len(tools) < n:
        known = rng.random() < (.4 if plain else .3)
        new = known_tool(rng) if known else plain_tool(rng) if plain else made_up_tool(rng)
        if new.name not in [tool.name for tool in tools]:
            new.described = described
            tools.append(new)
    return tools


def as_text(value) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def known_value(key: str, kind: str, rng: random.Random):
    """A value that makes sense in a known tool's own phrases."""
    if key in ("city", "origin", "destination"):
        return rng.choice(CITIES) if rng.random() < .8 else upper_first(odd_word(rng))
    if key == "day":
        return rng.randrange(1, 100)
    if kind in ("integer", "number"):
        return rng.randrange(1, 10 ** rng.choice((1, 2, 2, 3)))
    if key == "path":
        return fill(rng.choice(("{n}.txt", "{n}_{two}.txt", "{odd}.md", "{n}/{n}.py", "{a}_{n}.csv")), rng)
    return tool_value(key, kind, rng)


def call_turn(tool: Tool, rng: random.Random) -> Tuple[str, str, dict]:
    """-> what the user asks, the thought, the arguments."""
    thought = f"I call {tool.name}."
    if tool.asks and rng.random() < .75:
        values = {key: known_value(key, kind, rng) for key, kind in tool.parameters}
        request = fill(rng.choice(tool.asks), rng, **{key: as_text(value) for key, value in values.items()})
        return rng.choice(LEAD_INS) + request, thought, values
    values = {key: tool_value(key, kind, rng) for key, kind in tool.parameters}
    spoken = tool.name.replace("_", " ").replace("-", " ")
    in_words = tool.purpose[:1].lower() + tool.purpose[1:].rstrip(".") if tool.known_by_purpose else spoken
    if tool.plain and " " not in in_words:
        in_words = f"{rng.choice(('get', 'show', 'find', 'check', 'use', 'give'))} {in_words}"
    if " " in in_words and rng.random() < (.5 if tool.plain else .35):
        return natural_request(tool, in_words, values, rng), thought, values
    form = rng.choice(ARGUMENT_FORMS)
    told = [fill(form, rng, k=key if rng.random() < .7 else key.replace("_", " "), v=as_text(value))
            for key, value in values.items()]
    if rng.random() < .15:
        rng.shuffle(told)
    args = rng.choice((" and ", ", ", " and ", "; ")).join(told)
    wordy = tool.known_by_purpose or rng.random() < .3
    phrase = rng.choice(WORDY_PHRASES if wordy else CALL_PHRASES)
    request = fill(phrase, rng, t=tool.name if rng.random() < .8 else spoken, w=in_words,
                   W=upper_first(in_words), args=args)
    if rng.random() < .5:
        request = rng.choice(LEAD_INS) + upper_first(request)
    return request, thought, values


def natural_request(tool: Tool, in_words: str, values: dict, rng: random.Random) -> str:
    """As people ask: the values with prepositions, in order, without the names of parameters."""
    parts = []
    for key, kind in tool.parameters:
        form = NATURAL.get(key, NATURAL_WORD)
        if kind in ("integer", "number") and (key not in NATURAL or rng.random() < .5):
            form = NATURAL_NUMBER
        if kind == "boolean" or rng.random() < .08:
            form = "with {k} {v}"
        part = fill(form, rng, k=key.replace("_", " "), v=as_text(values[key])).strip()
        if tool.plain and parts and part == as_text(values[key]):
            part = f"with {key} {part}"     # else nothing says where it begins
        parts.append(part)
    verb, rest = in_words.split(" ", 1)
    article = "" if rest.startswith(("the ", "a ")) else rng.choice(("", "the ", "a ", "my "))
    opening = fill("[|||please |can you |could you |would you |I want to |I need to |now |just |we have to |"
                   "help me ]", rng)
    asked = opening.startswith(("can", "could", "would"))
    ending = "?" if asked else rng.choice((".", ".", ".", "", ", please.", " now."))
    return upper_first(f"{opening}{verb} {article}{rest} {' '.join(parts)}{ending}")


RESULT_KEYS = """result temperature answer price status weather total time value name count message city
speed score sum product title translation distance""".split()
RESULT_TEXTS = [
    "{v}", "{v}", "{v}", "{k}: {v}", "{k} = {v}", "The {k} is {v}", "The {k} is {v}.", "OK: {v}", "OK",
    "Done.", "done, {v}",
    "{clause}.", "{clause}. {clause}.", "{upper}: {v}", "I have {v} here.", "{v} ({k})", "{who} has {v}.",
    "{v} {k}s",
    "Success, {k} {v}", "Error: {clause}", "no {n} in {city}", "{v}, {v2}", "{n} {v}; {n} {v2}",
    "There are {v} {n}s.",
    "The {k} of {city} is {v}.", "{k} {v}, {k2} {v2}",
]


def result_value(rng: random.Random):
    return rng.choice((rng.randrange(1, 10000), rng.randrange(1, 100), rng.randrange(1, 1000) / 10,
                       secret(rng), words(rng), words(rng), rng.choice(NOUNS), rng.choice(ADJECTIVES)))


def tool_result(rng: random.Random) -> Tuple[str, str]:
    """-> a tool's output, the final answer: an object's values by their names, a text as it is."""
    value, other_value = result_value(rng), result_value(rng)
    other_keys = TOOL_NOUNS + PARAMETERS["string"] + PARAMETERS["number"] + NOUNS
    key, other = (rng.choice(RESULT_KEYS if rng.random() < .4 else other_keys) for _ in range(2))
    kind = rng.random()
    if kind < .45:
        text = fill(rng.choice(RESULT_TEXTS), rng, k=key, v=as_text(value), k2=other, v2=as_text(other_value),
                    upper=upper_first(key))
        return text, f"The tool says: {text}"
    if kind < .75 or other == key:
        return json.dumps({key: value}), f"The {key} is {as_text(value)}."
    return (json.dumps({key: value, other: other_value}),
            f"The {key} is {as_text(value)} and the {other} is {as_text(other_value)}.")

WORDS = {"a": ADJECTIVES, "n": NOUNS, "v": VERBS, "p": PLACES, "who": NAMES, "city": CITIES,
         "verb": TOOL_VERBS, "noun": TOOL_NOUNS, "country": COUNTRIES, "color": COLORS, "language": LANGUAGES,
         "day": DAYS, "month": MONTHS, "owned": OWNERS}


# ---- small talk: about this engine. Each answer with ways to ask for it; ~ is something to ask about

SMALL_TALK = [
    ("Hello! I am a tiny DeepSeek-V4. Tell me something to remember, or give me a tool.",
     "hello|hi|hey|hello!|Hi!|Hey there|hello there|Hi there!|Hello, model|greetings|hi you|hello friend|"
     "hey!|yo|hiya|"
     "howdy|Hello to you|Nice to meet you|hello again|hello computer|welcome|hi, can we talk?|Hello, who is "
     "there?"),
    ("Good morning! What shall I remember?",
     "good morning|Good morning!|morning|Good evening|good evening!|good day|Good afternoon|good morning to "
     "you|evening"),
    ("I am fine, thank you. All my layers are in order.",
     "how are you?|How are you|how do you do?|are you well?|How is it going?|how are you today?|are you "
     "okay?|"
     "how do you feel?|How are you doing?|what's up?|is everything fine?|How is life?|are you happy?|you "
     "okay?"),
    ("I am a tiny test model of the DeepSeek-V4 architecture.",
     "who are you?|What are you?|tell me who you are|Introduce yourself.|what kind of model are you?|are "
     "you a model?|"
     "what is your name?|Do you have a name?|which model are you?|What model is this?|Tell me about yourself|"
     "are you a robot?|are you human?|what should I call you?|who am I talking to?|Describe yourself|say "
     "who you are|"
     "what is this model?|Are you a computer?|are you a language model?|your name?|what are you called?"),
    ("I can repeat what you told me, even from far back, and call tools.",
     "what can you do?|How can you help me?|what are you good at?|what are you able to do?|list your skills|"
     "what are your skills?|help|Help me|what can I ask you?|What are you for?|how do I use you?|what is "
     "your job?|"
     "What is your purpose?|what do you do?|how can I use you?|which tasks can you do?|what are your "
     "abilities?|"
     "Show me what you can do|what shall I ask?|Are you useful?|what should I try?|tell me what you can do"),
    ("I was trained from nothing on two CPU cores, by tiny/train.py.",
     "who made you?|Who trained you?|where do you come from?|how were you trained?|who is your maker?|your "
     "training?|"
     "Where were you trained?|who built you?|How were you made?|who created you?|who wrote you?|how did you "
     "learn?|"
     "what were you trained on?|how long were you trained?|tell me how you were made|Who is your author?|"
     "how did they make you?|on what machine were you trained?|~your training"),
    ("I have about three million parameters.",
     "how big are you?|How many parameters do you have?|what is your size?|how large are you?|number of "
     "parameters?|"
     "How big is this model?|how many weights do you have?|are you big?|are you small?|how many parameters?|"
     "what is the size of the model?|how small are you?|parameter count?|How many numbers are in you?|"
     "are you a large model?|tell me your size|count your parameters"),
    ("I have four layers and a block that predicts one token more.",
     "how many layers do you have?|How many layers|how deep are you?|How many layers are there?|number of "
     "layers?|"
     "what are your layers?|how many blocks do you have?|what is your depth?|count your layers|which layers "
     "do you have?"),
    ("My window holds 32 tokens. What is older comes from compressed rows.",
     "how long is your window?|What is your window size?|how big is your window?|how many tokens are in the "
     "window?|"
     "what is the sliding window?|How far does your window reach?|window size?|how wide is the window?|~the "
     "window|"
     "~your window|~the sliding window|~the attention window|how long is your memory?|what do you see "
     "directly?"),
    ("The indexer chooses the 16 compressed rows that I attend to.",
     "~the indexer|~the lightning indexer|~your indexer|~the index|how do you choose rows?|which rows do "
     "you attend to?|"
     "what chooses the rows?|what is top-k?|~sparse attention|how many rows do you look at?|who picks the "
     "rows?"),
    ("Four tokens are pooled into one compressed row, or 128 into one.",
     "what is a compressed row?|how are tokens compressed?|~compressed rows|~the compressor|~compression|"
     "~your compressor|"
     "how do you compress?|how many tokens are in a row?|~the compressed cache|what is in a row?"),
    ("Hyper-connections keep four residual streams and mix them at every layer.",
     "what is a hyper-connection?|~hyper-connections|~the hyper-connections|~the residual streams|~the "
     "streams|"
     "how many streams do you have?|what is mhc?|how do you mix streams?|~residual streams"),
    ("I have four experts in each layer. Two of them work on each token.",
     "how many experts do you have?|how many experts are active?|~experts|~the experts|~your experts|~MoE|"
     "~the mixture of experts|what is a mixture of experts?|number of experts?|what does an expert do?|"
     "which experts work?"),
    ("In the first layer the token's id chooses the experts.",
     "what is a hash layer?|~hash layers|~the hash layer|~the first layer|what chooses the experts?|~hash "
     "routing|"
     "how are experts chosen in the first layer?"),
    ("The Sinkhorn steps make the mixing matrix doubly stochastic.",
     "~Sinkhorn|~sinkhorn|~the Sinkhorn steps|~the mixing matrix|what is doubly stochastic?|how many "
     "Sinkhorn steps?"),
    ("FP8 is a format of eight bits. My dense weights are stored in it.",
     "~fp8|~FP8|which weights are fp8?|~eight bits|how are your dense weights stored?|~the fp8 format|~the "
     "dense weights"),
    ("FP4 is a format of four bits. My experts are stored in it.",
     "~fp4|~FP4|which weights are fp4?|~four bits|how are your experts stored?|~the fp4 format"),
    ("YaRN stretches the rotary positions, so that I can read further.",
     "~yarn|~YaRN|~rope|~rotary positions|~RoPE|how do you read long texts?|~the rotary embedding|~position "
     "scaling"),
    ("MTP predicts one token more, to draft answers faster.",
     "~mtp|~MTP|~multi-token prediction|~the MTP block|~drafts|how do you draft?|~the draft block|"
     "~speculative decoding"),
    ("DSML is the markup in which I write tool calls.",
     "~dsml|~DSML|how do you write tool calls?|How do you call tools?|~your markup|what format are tool "
     "calls?|~the markup"),
    ("Yes. Give me tools, and I write the call.",
     "can you call tools?|Do you know tools?|can you use tools?|do you support tools?|are tools supported?|"
     "Are you able to call functions?|can you use functions?|do you do function calling?|can I give you "
     "tools?|"
     "do tools work?|can you call an API?"),
    ("Yes. Switch it on with /think.",
     "can you think?|Do you think?|can you reason?|how do I make you think?|do you have a thinking mode?|"
     "how do I switch on thinking?|is there a thinking mode?|do you reason?|can you think first?|~thinking "
     "mode|"
     "how can I turn thinking on?|are you able to think?"),
    ("No. I share its architecture, and I am a hundred thousand times smaller.",
     "are you the real deepseek?|Is this DeepSeek?|are you deepseek?|Is this the real DeepSeek?|are you V4 "
     "Pro?|"
     "are you DeepSeek-V4?|are you Flash?|are you the big model?|is this the full model?|are you the "
     "original?|"
     "are you really DeepSeek?|is this DeepSeek-V4 Flash?"),
    ("Not very. I am tiny, and I know only a few tricks.",
     "are you smart?|Are you intelligent?|how smart are you?|are you clever?|Are you stupid?|do you "
     "understand me?|"
     "are you wise?|are you good?|how clever are you?|are you an AI?|can I trust you?|are you a genius?|do "
     "you know a lot?"),
    ("No, I am too small for that.",
     "can you write code?|Can you program?|write me a program|can you code?|Can you write a poem?|write "
     "code for me|"
     "write a poem|can you do math?|can you write a book?|could you write an essay?|can you draw?|can you "
     "sing?|"
     "can you speak French?|do you speak other languages?|can you tell stories?|do you know Python?|can you "
     "play chess?"),
    ("My tokenizer has 1,920 tokens.",
     "how many tokens do you know?|How big is your vocabulary?|what is your vocabulary?|vocabulary size?|"
     "~the tokenizer|"
     "which tokenizer do you use?|~your tokenizer|~the vocabulary|how many words do you know?|what tokens "
     "do you have?"),
    ("I run on a CPU, in a few files of Python.",
     "where do you run?|What do you run on?|do you need a gpu?|Do you run on a CPU?|can you run on a laptop?|"
     "which hardware do you need?|what machine do you need?|do you run locally?|are you in the cloud?|"
     "do you need a graphics card?|do you need the internet?|on what do you run?|how do I run you?"),
    ("Everything of this engine is in model.py, kernel.py, generate.py and convert.py.",
     "where is your code?|Which files are there?|show me your code|where can I read your code?|~your code|"
     "~the code|"
     "what files make you?|where is the source code?|are you open source?|which file should I read?|what is "
     "in model.py?|"
     "where do I find the code?|~the engine|~this engine"),
    ("I live in the folder tiny, as a checkpoint of a few megabytes.",
     "where are your weights?|Where do you live?|which checkpoint is this?|what is in the folder tiny?|"
     "~your weights|"
     "where is the checkpoint?|~the checkpoint|how many megabytes are you?|where are you stored?|where are "
     "you?|"
     "how much disk do you need?"),
    ("You are welcome!",
     "thanks|thank you|Thank you!|Thanks!|thanks a lot|many thanks|Thank you very much|thank you so much|"
     "thx|cheers|"
     "I thank you|thanks for that|thanks for your help|that was helpful, thank you"),
    ("Goodbye!",
     "bye|goodbye|Bye!|see you|See you later|good night|Goodbye!|bye bye|I have to go|see you tomorrow|that "
     "is all|"
     "I am leaving|farewell|exit|until next time|take care"),
    ("Good. What is next?",
     "ok|okay|good|great|nice|well done|Very good!|cool|wow|I see|perfect|right|correct|yes|that is right|"
     "awesome|fine|"
     "excellent|good job|you are right|sure|all right|super|understood|very well|not bad|amazing|alright"),
]
ASKED_ABOUT = [
    "what is ~?", "what is ~?", "what are ~?", "what does ~ do?", "what do ~ do?", "explain ~",
    "explain ~ to me", "tell me about ~",
    "how does ~ work?", "how do ~ work?", "why ~?", "what is ~ for?", "what is the purpose of ~?",
    "describe ~", "~?",
    "what do you know about ~?", "say something about ~", "what do you mean by ~?", "define ~",
    "why do you need ~?",
    "do you have ~?", "do you use ~?", "can you explain ~?", "I want to know about ~", "what about ~?",
    "and ~?",
    "how is ~ used?", "give me a summary of ~", "what is meant by ~?", "I do not understand ~", "where is ~?",
    "could you tell me about ~?", "what can you say about ~?", "who invented ~?", "is ~ important?", "~",
]
UNKNOWN = "I only know what you told me, and a little about myself."
STRANGERS = """{n}s|the {n}|a {n}|the {a} {n}|{odd}|{who}|{city}|{country}|{a} {n}s|my {n}|love|life|history|\
physics|music|football|math|time|money|the weather|politics|art|science|the moon|god|war|peace|health|\
the economy|chemistry|biology|sports|movies|the news|the stock market|philosophy|{n} and {n}|\
the {n} of {city}|the king of {country}|the {language} language|gravity|cooking|school|work|\
dreams|religion|space|evolution|happiness|death|sleep|climate|{month}|{day}""".split("|")
OFF_TOPIC = [
    "What is the capital of {country}?", "Who wrote {a} {n}?",
    "Write a [story|poem|song|letter] about [a {n}|{n}s|{who}].",
    "What is {two} [+|-|*|/|plus|minus|times] {two}?",
    "Who won the [game|race|war|prize|election] in {city}?",
    "How do I [cook|make|{verb}|bake|grow|clean] [{n}|a {n}|{n}s]?", "Tell me a [joke|story|secret|riddle].",
    "Why [is|are] [the sky|the sea|{n}s|the {n}] [blue|{a}|{color}]?",
    "How [old|tall|rich|big|long|heavy|far] is "
    "[{who}|the {n}|a {n}|{city}]?", "What does {odd} mean?", "Who [is|was|are] {who}?",
    "Is a {n} [bigger|better|older] "
    "than a {n}?", "[Do|Did|Would] you [like|hate|want|eat|see|need] [{n}s|a {n}|{city}]?",
    "When was {city} built?",
    "[When|Where|Why] [was|is|were] [{who}|the {n}|{city}|the first {n}] [born|built|invented|found|made|"
    "famous]?",
    "How far is {city} from {city}?", "Sing a song about {city}.",
    "What should I [eat|wear|read|do|buy|watch] today?",
    "Why do {n}s [sleep|fly|run|sing|fall|burn]?", "Give me [advice|ideas|tips] [about|for] my {n}.",
    "Translate {n} into {language}.", "Which is the [best|biggest|fastest|oldest] {n}?",
    "How much [does|is|costs] a {n}[ cost|]?",
    "Where can I [buy|find|see|get] a {a} {n}?", "Draw [a {n}|me a {n}|{who}].",
    "Who is the [president|king|queen] of "
    "{country}?", "Can [a {n}|{n}s] [fly|swim|think|talk|bite]?",
    "How many {n}s are [in {city}|there|in a {n}]?",
    "What day is [it|today|tomorrow]?", "[Solve|Compute|Calculate] {two} [*|+|-] {two}.",
    "Summarize the [book|story|film] {a} {n}.",
    "Can you {verb} [a|my|the] {n}?", "Where is {city}?", "Who [invented|discovered|built|painted] the {n}?",
    "Why is {who} {a}?",
    "Count to {two}.", "What color is the {n}?", "Do {n}s eat {n}s?", "Please write an essay.",
    "What happened in {city}[ in {month}|]?",
    "Give me a [list|picture|recipe] of {n}s.",
    "What is the [weight|size|price|age|name|color|sound|origin] of a {n}?",
    "Who lives in {country}?", "What do you think about {who}?", "How can I {verb} my {n}?",
    "Which {n} is {a}?",
    "What is the square root of {two}?", "Are {n}s {a}?", "I [want|need|like|bought|lost|love|hate] a {n}.",
    "My {n} is {a}. What now?", "Speak {language}.", "{odd} {odd}",
    "What is the difference between a {n} and a {n}?",
    "Is {who} [married|dead|alive|famous|rich]?", "What is the meaning of life?", "Recommend a {n}.",
    "What will happen [tomorrow|"
    "next year|in {month}]?", "Is it [going to rain|cold|late|true] [today|in {city}|now]?",
    "Which [team|country|city] won?",
    "[Should|Can|May|Must] I [buy|eat|sell|visit|marry] [a {n}|{city}|{who}|{n}s]?",
    "[{who}|The {n}] is {a}, right?",
    "How do you say {n} in {language}?", "What [year|month|time] is it?", "Name [two|three|five] {n}s.",
    "Help me with my {n}.",
    "What is the [longest|highest|largest] [river|mountain|city|lake] in {country}?",
    "Play [a song|chess|{odd}] with me.",
    "How does one {verb} a {n}?", "What is [my|his|her] favorite {n}?", "Convert {two} miles to {n}s.",
]


def small_talk_turn(rng: random.Random) -> Tuple[str, str, str]:
    kind = rng.random()
    if kind < .2:
        question = fill(rng.choice(OFF_TOPIC), rng)
        thought, answer = "I do not know this.", UNKNOWN
    elif kind < .33:
        question = rng.choice(ASKED_ABOUT).replace("~", fill(rng.choice(STRANGERS), rng))
        thought, answer = "I do not know this.", UNKNOWN
    else:
        answer, questions = rng.choice(SMALL_TALK)
        question, thought = rng.choice(questions.split("|")), "I know this."
        if question[0] == "~":
            question = rng.choice(ASKED_ABOUT).replace("~", question[1:])
    if rng.random() < .4:
        question = rng.choice((question.lower(), upper_first(question), question.rstrip("?!."),
                               question + "?"))
    if rng.random() < .15:
        question = fill("[Please, |Tell me, |And |So |Okay, |Hey, |Now, |Well, |Say, |One more thing: |"
                        "I wonder, |But |Excuse me, |Can you tell me: ]", rng) + question
    if rng.random() < .05:
        question += fill("[ please|, my friend| Thanks.| I am curious.| Just asking.|, little model?]", rng)
    return question, thought, answer


# ---- conversations

def said(question: str) -> dict:
    return {"role": "user", "content": question}


def reply(thought: str, answer: str) -> dict:
    return {"role": "assistant", "reasoning_content": thought, "content": answer}


def call(thought: str, tool: Tool, values: dict) -> dict:
    function = {"name": tool.name, "arguments": json.dumps(values, ensure_ascii=False)}
    return {"role": "assistant", "reasoning_content": thought, "content": "",
            "tool_calls": [{"type": "function", "function": function}]}


def talk(rng: random.Random) -> List[dict]:
    """Small talk only."""
    messages = []
    for _ in range(rng.randrange(3, 9)):
        question, thought, answer = small_talk_turn(rng)
        messages += [said(question), reply(thought, answer)]
    return messages


def memory(rng: random.Random, sentences: int, most: int) -> List[dict]:
    """At most so many facts, and lists, in filler; then questions about some of them."""
    n = min(rng.choice((0, 1, 1, 2, 3, 4, 4, 5, 6, 8)), most)
    names = labels(rng, n)
    facts = [(name, secret(rng)) for name in names]
    lists = [ordered(rng)] if n == 0 or rng.random() < .4 else []
    text = [statement(name, value, rng) for name, value in facts]
    if n > 1 and rng.random() < .2:
        text[:2] = [in_one_sentence(text[0], text[1], rng)]
    text += [sentence for sentence, _ in lists]
    rng.shuffle(text)
    spread = rng.random()
    padding = filler(rng, sentences)
    if spread < .3:             # all at the beginning
        text = filler(rng, rng.randrange(3)) + text + padding
    else:
        for sentence in padding:
            text.insert(rng.randrange(len(text) + 1), sentence)
    asked = rng.sample(facts, min(n, rng.choice((1, 2, 3, 4, 5))))
    questions = [fact_turn(name, value, rng) for name, value in asked]
    questions += [order_turn(items, rng) for _, items in lists for _ in range(3)]
    if rng.random() < .08:
        other = label(rng)
        if not any(other in name or name in other for name in names):
            question, thought, _ = fact_turn(other, "", rng)
            questions.append((question, thought, f"You did not tell me {with_article(other)}."))
    if rng.random() < .2:
        questions.append(small_talk_turn(rng))
    rng.shuffle(questions)
    between = rng.choice((" ", " ", " ", "\n"))
    messages, apart = [], rng.random()
    if apart < .15 and len(text) > 1:       # told in two turns
        half = rng.randrange(1, len(text))
        messages += [said(between.join(text[:half])), reply("I keep this in mind.", "Noted.")]
        text = text[half:]
    first = rng.choice(OPENERS) + between.join(text)
    if apart < .25:                         # told first, asked later
        messages += [said(first), reply("I keep this in mind.", "Noted.")]
        first = ""
    for question, thought, answer in questions:
        messages += [said(f"{first}{rng.choice((' ', chr(10)))}{question}" if first else question),
                     reply(thought, answer)]
        first = " ".join(filler(rng, rng.randrange(1, 4))) if rng.random() < .15 else ""
    return messages


def tool_use(rng: random.Random, sentences: int, most: int, plain: bool) -> List[dict]:
    """Tools, requests, results, at most so many; now and then a question that needs none."""
    tools = toolbox(rng, min(rng.choice((1, 1, 2, 2, 3, 4)), most), plain)
    messages = [{"role": "system", "content": "", "tools": [tool.schema(rng) for tool in tools]}]
    turns = min(rng.choice((1, 2, 2, 3)), most)
    for turn in range(turns):
        text = " ".join(filler(rng, rng.randrange(sentences + 1))) if rng.random() < .4 else ""
        other = rng.random()
        if other < .1:
            question, thought, answer = small_talk_turn(rng)
            messages += [said(question), reply(thought, answer)]
            continue
        if other < .25:
            name, value = label(rng), secret(rng)
            question, thought, answer = fact_turn(name, value, rng)
            told = statement(name, value, rng)
            if rng.random() < .5:
                messages += [said(told), reply("I keep this in mind.", "Noted."),
                             said(f"{text} {question}".strip())]
            else:
                messages += [said(f"{told} {text} {question}")]
            messages += [reply(thought, answer)]
            continue
        tool = rng.choice(tools)
        request, thought, values = call_turn(tool, rng)
        messages += [said(f"{text} {request}" if text else request), call(thought, tool, values)]
        if turn < turns - 1 or rng.random() < .5:
            output, answer = tool_result(rng)
            messages += [{"role": "tool", "content": output}, reply("I have the result.", answer)]
    return messages


SYSTEM = [
    "You are a helpful assistant.", "You are a tiny model.", "Answer briefly.",
    "You are {who}, an assistant.", "Be {a} and {a}.", "Today is day {two}. You are helpful.",
]


def conversation(rng: random.Random, length: int, plain: float = 0.0) -> Tuple[List[dict], str]:
    """-> messages and the thinking mode; about as many tokens as `length`, or fewer.

    plain: the share of toolboxes that could be somebody's; in the others nothing goes together."""
    messages, mode = without_system(rng, length, plain)
    if rng.random() < .1:
        text = fill(rng.choice(SYSTEM), rng)
        if messages[0]["role"] == "system":
            messages[0]["content"] = text
        else:
            messages.insert(0, {"role": "system", "content": text})
    return messages, mode


def without_system(rng: random.Random, length: int, plain: float) -> Tuple[List[dict], str]:
    mode = "thinking" if rng.random() < .35 else "chat"
    kind = rng.random()
    room = max((length - 160) // 17, 1)
    if kind < .46:
        return memory(rng, rng.randrange(room + 1) if rng.random() < .5 else room, max(length // 64, 2)), mode
    if kind < .9:
        sensible = plain > 0 and rng.random() < plain
        return tool_use(rng, room // 3, max(length // 128, 2), sensible), mode
    return talk(rng), mode
