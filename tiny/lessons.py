"""What the checkpoint in the box learns from: conversations, made on the fly, in the real chat format.

A conversation is a list of messages as generate.encode_messages takes them. `conversation` draws one; nothing
is stored, and the same random state gives the same text. Filler sentences are put together from the words
below. Answers have one form for each kind of question, so that what is asked for is copied and not invented.
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
whistle yogurt badge cactus donkey ember flute grape hornet icicle""".split()
ADJECTIVES = """golden broken frozen rapid bright narrow clever gentle open ancient quiet loud empty heavy
hidden simple plain dark small tall warm young early late distant brave calm dusty eager fancy happy jolly
kind lively mighty noble proud rusty shiny tiny upset vivid wild wooden zesty bitter crisp dull fresh grand
humble""".split()
VERBS = """crosses paints closes reads watches moves keeps lifts builds carries follows cleans visits opens
finds holds leaves turns writes buys sells breaks draws hides""".split()
PLACES = "under over behind near beside across around inside before after above below".split()
NAMES = """Jan Dora Finn Zoe Rob Ivy Gus Ada Max Nina Ben Carl Emil Fay Hugo Ida Kai Lena Mark Otto Rosa Sam
Tom Uma Vera Will Anna Bert Cleo Dan Eva Fred Gina Hana Igor Jack Kim Leo Mia Noah Olga Paul Ruth Sara Ted
Una Vic Wendy Yara Zack""".split()
CITIES = """Oslo Riga Cairo Quito Bonn Lima Paris Rome Tokyo Delhi Seoul Berlin Madrid Vienna Prague Dublin
Athens Lisbon Warsaw Boston Denver Dallas Miami Sydney Nairobi Havana Kyoto Milan""".split()
LABELS = """passphrase|password|code word|secret word|door code|locker number|room number|key phrase|\
magic word|pin|meeting place|user name|favorite color|ticket number|order number|account name|safe code|\
project name|team name|license key|phone number|street name|shelf label|box number|code name|file name|\
gate code|wifi password|server name|account number|secret|number|code|word|name|token|key|answer|signal|\
badge number|lucky number|birthday|address|nickname|hotel|size|price|title|color|vault code|alarm code|\
train|flight|seat""".split("|")
SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]

# ---- what is said before, between and after: sentences that mean nothing

FILLER = [
    "The {a} {n} {v} the {n} {p} the {a} {n}.", "A {n} {v} {p} the {n}, and {who} {v} the {n}.",
    "There are {two} {a} {n}s {p} the {n}.", "{who} {v} a {a} {n} every morning.",
    "{who} and {who} talk about {odd} and the {n}.", "In {city} a {a} {n} {v} the {n}.",
    "{who} went to {city} with {two} {n}s.", "It was a {a} day, and the {n} was {a}.",
    "Nobody in {city} knows why the {n} {v} the {n}.", "My {n} is {a}, but yours is {a}.",
    "The train to {city} leaves at {two}:{two}.", "Then {who} {v} the {n} again.",
    "If the {n} is {a}, {who} {v} the {n}.", "On page {two} the {n} {v} a {a} {n}.",
    "{who} says that the {n} {p} the {n} is {a}.", "You should see the {a} {n} in {city}.",
    "Every {n} needs a {a} {n}.", "The price of a {n} is {two} or {two}.", "What a {a} {n}!",
    "I like the {n} because it is {a} and {a}.", "We had {n} and {n} for lunch.", "{odd} {n} {odd} {a}.",
    "{verb} {n} {a} {odd}, {two} {who} {p} {city}.", "Chapter {two}: the {n} of {who}.",
    "{n}, {n}, {a}, {odd}.", "Is the {n} {a}? Nobody knows.", "{who}: the {a} {n} {v} {two} {n}s.",
]


def fill(template: str, rng: random.Random, **values: str) -> str:
    """The template with a value or a random word for each of its places."""
    kinds = {"a": ADJECTIVES, "n": NOUNS, "v": VERBS, "p": PLACES, "who": NAMES, "city": CITIES,
             "verb": TOOL_VERBS, "country": COUNTRIES}

    def word(place):
        kind = place[1]
        if kind in values:
            return values[kind]
        if kind == "two":
            return str(rng.randrange(10, 100))
        return odd_word(rng) if kind == "odd" else rng.choice(kinds[kind])
    return re.sub(r"\{(\w+)\}", word, template)


def odd_word(rng: random.Random) -> str:
    word = "".join(rng.choice(SYLLABLES) for _ in range(rng.choice((2, 2, 3))))
    return word + rng.choice(("", "", "n", "s", "r"))


def filler(rng: random.Random, sentences: int) -> List[str]:
    return [fill(rng.choice(FILLER), rng) for _ in range(sentences)]


def secret(rng: random.Random) -> str:
    """Something worth remembering: words, made-up words, numbers, codes."""
    kind = rng.random()
    if kind < .35:
        return fill(rng.choice(("{a} {n}", "{n} {n}", "{a} {a} {n}", "{n} {n} {n}")), rng)
    if kind < .45:
        return fill(rng.choice(("{n}-{n}", "{a}-{n}", "{n}{two}", "{n}-{two}", "{n}_{n}")), rng)
    if kind < .55:
        return rng.choice(NOUNS + NAMES + CITIES + ADJECTIVES)
    if kind < .72:
        return " ".join(odd_word(rng) for _ in range(rng.choice((1, 1, 2))))
    if kind < .87:
        return number(rng)
    signs = string.ascii_uppercase + string.digits
    letters = "".join(rng.choice(signs) for _ in range(rng.choice((4, 5, 6))))
    return letters if rng.random() < .4 else letters[:2] + "-" + letters[2:]


def number(rng: random.Random) -> str:
    digits = rng.choice((2, 3, 4, 4, 5, 6))
    return str(rng.randrange(10 ** (digits - 1), 10 ** digits))


# ---- facts: a label and what it stands for

STATEMENTS = [
    "The {L} is {S}.", "The {L} is {S}.", "Remember: the {L} is {S}.",
    "Please remember that the {L} is {S}.", "Note that the {L} is {S}.",
    "Keep this in mind: the {L} is {S}.", "The {L} is now {S}.", "{L}: {S}.", "{L}: {S}", "{L} = {S}",
    "The new {L} is {S}.", "By the way, the {L} is {S}.", "Let the {L} be {S}.", "I set the {L} to {S}.",
    "We use {S} as the {L}.", "{S} is the {L}.", "They changed the {L} to {S}.",
    "Write down the {L}: {S}.", "For later: {L} {S}.", "The {L} will be {S}.", "Today the {L} is {S}.",
    "I chose {S} as the {L}.", "Do not tell anyone that the {L} is {S}.", "Save this {L}: {S}.",
    "This is the {L}: {S}.", "Here is the {L}: {S}.", "It is important: the {L} is {S}.",
    "As {who} said, the {L} is {S}.", "The {L}, by the way, is {S}.", "The {L} was {S}.",
]
QUESTIONS = [
    "What is the {L}?", "What is the {L}?", "what is the {L}", "Tell me the {L}.",
    "Do you remember the {L}?", "Please repeat the {L}.", "Which {L} did I give you?",
    "I forgot the {L}. What was it?", "Say the {L} again.", "The {L}?", "Can you recall the {L}?",
    "Now give me the {L}, please.", "What was the {L}?", "And the {L}?", "I need the {L}.",
    "Could you repeat the {L}?", "What did I say the {L} was?", "Remind me of the {L}.",
    "Do you know the {L}?", "Give me the {L}.", "Please write the {L}.", "Which is the {L}?", "{L}?",
    "Repeat the {L}, please.", "What is the {L} that I told you?", "Show me the {L}.",
]
LEAD_INS = [
    "", "", "", "", "", "Okay. ", "Now: ", "So, ", "Thanks. ", "Good. ", "One question: ", "Well, ",
    "Listen. ",
]
OPENERS = [
    "", "", "", "", "Hello! ", "Hi. ", "Please read this. ", "Here is a story. ", "Some notes: ",
]


def label(rng: random.Random) -> str:
    """'door code', or whose: 'door code for Jan'."""
    made_up = "{n} code", "{n} number", "{n} word", "{a} {n}", "{odd} code"
    plain = rng.choice(LABELS) if rng.random() < .85 else fill(rng.choice(made_up), rng)
    kind = rng.random()
    if kind < .45:
        return plain
    owner = fill(rng.choice(("{who}", "{who}", "{city}", "the {n}", "room {two}", "the {a} {n}")), rng)
    return f"{plain} {rng.choice(('for', 'of', 'for'))} {owner}"


def labels(rng: random.Random, n: int) -> List[str]:
    """n labels; often of one kind, so that only their owners tell them apart."""
    if n > 1 and rng.random() < .6:
        plain = rng.choice(LABELS)
        owners = rng.sample(NAMES, n) if rng.random() < .7 else rng.sample(CITIES, n)
        return [f"{plain} for {owner}" for owner in owners]
    found: List[str] = []
    while len(found) < n:
        new = label(rng)
        if all(new != old and new not in old and old not in new for old in found):
            found.append(new)
    return found


def upper_first(text: str) -> str:
    return text[:1].upper() + text[1:]


def statement(name: str, value: str, rng: random.Random) -> str:
    return upper_first(fill(rng.choice(STATEMENTS), rng, L=name, S=value))


def fact_turn(name: str, value: str, rng: random.Random) -> Tuple[str, str, str]:
    """-> question, thought, answer."""
    question = rng.choice(LEAD_INS) + upper_first(fill(rng.choice(QUESTIONS), rng, L=name))
    return question, f"I look for the {name}.", f"The {name} is {value}."


# ---- order

LISTS = [
    ("I saw a {0}, then a {1}, then a {2}.", 3), ("First came the {0}, then the {1}, then the {2}.", 3),
    ("In order: {0}, {1}, {2}.", 3), ("In order: {0}, {1}, {2}, {3}.", 4),
    ("My list: {0}, {1}, {2}, {3}.", 4), ("We met the {0}, then the {1} and then the {2}.", 3),
    ("The steps are {0}, {1}, {2}.", 3), ("They passed {0}, {1}, {2} and {3}.", 4),
    ("The line: {0}, {1}, {2}, {3}, {4}.", 5), ("1. {0} 2. {1} 3. {2}", 3),
    ("{who} bought {0}, then {1}, then {2}.", 3), ("The order is {0}, {1}, {2}.", 3),
    ("Remember this order: {0}, {1}, {2}, {3}.", 4),
]
ORDER_QUESTIONS = [
    "Which was {o}?", "What was {o}?", "What came {o}?", "Which one came {o}?", "Tell me the {o} one.",
    "Which is the {o}?", "The {o} one?", "What is the {o} in the list?", "Name the {o}.",
]
AFTER_QUESTIONS = [
    "What came right after {x}?", "What came after {x}?", "Which one comes right after {x}?",
    "And after {x}?", "What follows {x}?", "Tell me what came right after {x}.",
    "What was next after {x}?",
]
ORDINALS = ["first", "second", "third", "fourth", "fifth"]


def ordered(rng: random.Random) -> Tuple[str, List[str]]:
    """-> a sentence with an ordered list, the items."""
    template, n = rng.choice(LISTS)
    items = rng.sample(rng.choice((NOUNS, NOUNS, NAMES, CITIES)), n)
    return fill(template, rng, **{str(i): item for i, item in enumerate(items)}), items


def order_turn(items: List[str], rng: random.Random) -> Tuple[str, str, str]:
    lead = rng.choice(LEAD_INS)
    if rng.random() < .55:
        i = rng.randrange(min(len(items), 4))
        question = rng.choice(ORDER_QUESTIONS).replace("{o}", ORDINALS[i])
        return lead + question, f"I look for the {ORDINALS[i]} one.", f"The {ORDINALS[i]} was {items[i]}."
    i = rng.randrange(len(items) - 1)
    question = rng.choice(AFTER_QUESTIONS).replace("{x}", items[i])
    return lead + question, f"I look for {items[i]}.", f"Right after {items[i]} came {items[i + 1]}."


# ---- tools

class Tool:
    """A function's name, what it is for, and its parameters as (name, type)."""
    def __init__(self, name: str, purpose: str, parameters: List[Tuple[str, str]], asks: List[str] = ()):
        self.name, self.purpose, self.parameters, self.asks = name, purpose, parameters, list(asks)

    def schema(self, rng: random.Random) -> dict:
        """In OpenAI form; descriptions, required and such come and go."""
        properties = {}
        for name, kind in self.parameters:
            properties[name] = {"type": kind}
            if self.described:
                text = rng.choice(("The {k}.", "{k} of the {n}", "The {a} {k}", "Which {k}"))
                properties[name]["description"] = fill(text, rng, k=name.replace("_", " "))
        parameters = {"type": "object", "properties": properties}
        if rng.random() < .8:
            parameters["required"] = [name for name, _ in self.parameters]
        function = {"name": self.name}
        if rng.random() < .75:
            function["description"] = self.purpose
        return {"type": "function", "function": function | {"parameters": parameters}}

    described = False


KNOWN_TOOLS = [
    ("get_weather", "Get the weather in a city.", "city:string", [
        "What is the weather in {city}?", "How is the weather in {city}?", "Weather in {city}, please.",
        "Is it raining in {city}?", "Will it rain in {city}?"]),
    ("weather", "Weather for a place and a day.", "city:string day:integer", [
        "What is the weather in {city} on day {day}?", "Weather for {city}, day {day}.",
        "How will the weather in {city} be on day {day}?"]),
    ("get_time", "Current time in a city.", "city:string", [
        "What time is it in {city}?", "Tell me the time in {city}.", "How late is it in {city}?"]),
    ("send_email", "Send an email.", "to:string subject:string", [
        "Send an email to {to} about {subject}.", "Write to {to} about {subject}.",
        "Email {to}: {subject}."]),
    ("search", "Search the web.", "query:string", [
        "Search for {query}.", "Look up {query}.", "Find {query} on the web.",
        "Please search the web for {query}."]),
    ("set_timer", "Start a timer.", "minutes:integer", [
        "Set a timer for {minutes} minutes.", "Start a timer of {minutes} minutes.",
        "Timer: {minutes} minutes."]),
    ("add", "Add two numbers.", "a:number b:number", [
        "Add {a} and {b}.", "What is {a} plus {b}?", "Compute the sum of {a} and {b}."]),
    ("multiply", "Multiply two numbers.", "a:number b:number", [
        "Multiply {a} by {b}.", "What is {a} times {b}?"]),
    ("book_hotel", "Book a hotel room.", "city:string nights:integer", [
        "Book a hotel in {city} for {nights} nights.", "I need a room in {city} for {nights} nights."]),
    ("translate", "Translate a text.", "text:string language:string", [
        "Translate {text} into {language}.", "How do you say {text} in {language}?"]),
    ("play_music", "Play a song.", "title:string", [
        "Play {title}.", "I want to hear {title}."]),
    ("find_flight", "Find a flight.", "origin:string destination:string", [
        "Find a flight from {origin} to {destination}.", "I want to fly from {origin} to {destination}."]),
    ("light", "Switch a light.", "room:string on:boolean", [
        "Set the light in the {room} to {on}.", "Light in the {room}: {on}."]),
    ("read_file", "Read a file.", "path:string", [
        "Read the file {path}.", "Open {path}.", "Show me {path}."]),
    ("create_note", "Write a note.", "title:string text:string", [
        "Make a note called {title}: {text}.", "Write a note {title} that says {text}."]),
    ("stock_price", "Price of a stock.", "symbol:string", [
        "What is the price of {symbol}?", "How much is {symbol} stock?", "Price of {symbol}?"]),
]
TOOL_VERBS = """get find list make send show open start stop check count read set move save load book call
pick sort update delete create fetch""".split()
TOOL_NOUNS = """movie news alarm order photo user game song recipe map ticket bank score taxi train pizza
joke diary radio robot stock chart page table label item task event report message file team city street
camera printer door lamp garden market rocket engine letter button kitten planet""".split()
PARAMETERS = {
    "string": """name title text city color label team street query symbol language person place subject food
genre path note reason country author topic kind""".split(),
    "integer": "count page day limit year id hour size level nights rank index".split(),
    "number": "price weight amount speed width height score ratio".split(),
    "boolean": "urgent open quiet fast".split(),
}
CALL_PHRASES = [
    "Use {t}: {args}.", "Call {t} with {args}.", "Please run {t} with {args}.", "{t}: {args}",
    "Use the tool {t} with {args}.", "I need {t} with {args}.", "With {args}, call {t}.",
    "Run {t}, {args}.", "Can you use {t} for {args}?", "Please call {t}: {args}.",
    "Now {t} with {args}, please.", "Start {t} with {args}.", "Do {t} for {args}.", "Try {t} with {args}.",
    "Take {args} and call {t}.", "I want you to call {t} with {args}.", "Let us use {t}: {args}.",
    "{t} please, {args}.",
]
WORDY_PHRASES = [       # the tool's name as words
    "Please {w}: {args}.", "{W} with {args}.", "I want to {w}, {args}.", "Can you {w}? {args}.",
    "Could you {w} for me? {args}.", "{W}, {args}.", "Help me {w}: {args}.",
]
ARGUMENT_FORMS = ["{k} {v}", "{k} {v}", "{k} = {v}", "{k}: {v}", "the {k} is {v}", "{v} as {k}", "{k} is {v}"]


def tool_value(kind: str, rng: random.Random):
    if kind == "string":
        pick = rng.random()
        if pick < .5:
            return rng.choice(rng.choice((NOUNS, NAMES, CITIES, ADJECTIVES)))
        return secret(rng) if pick > .7 else fill(rng.choice(("{a} {n}", "{n} {n}", "{odd}")), rng)
    if kind == "integer":
        return rng.randrange(1, 10 ** rng.choice((1, 2, 3, 4)))
    if kind == "number":
        if rng.random() < .6:
            return rng.randrange(1, 1000)
        return rng.randrange(1, 10000) / rng.choice((10, 100))
    return rng.random() < .5


def made_up_tool(rng: random.Random) -> Tool:
    pick = rng.random()
    if pick < .5:
        name = f"{rng.choice(TOOL_VERBS)}_{rng.choice(TOOL_NOUNS if rng.random() < .6 else NOUNS)}"
    elif pick < .75:
        name = rng.choice(TOOL_NOUNS if rng.random() < .5 else NOUNS)
    else:
        name = "_".join(odd_word(rng) for _ in range(rng.choice((1, 1, 2))))
    n = rng.choice((1, 1, 1, 2, 2, 3))
    kinds = rng.choices(("string", "integer", "number", "boolean"), (5, 2, 1, .5), k=n)
    parameters: List[Tuple[str, str]] = []
    for kind in kinds:
        key = rng.choice(PARAMETERS[kind] if rng.random() < .85 else NOUNS)
        if rng.random() < .08:
            key = f"{key}_{rng.choice(TOOL_NOUNS)}"
        if key not in [k for k, _ in parameters]:
            parameters.append((key, kind))
    purposes = "{verb} the {n}.", "Handles a {a} {n}.", "A tool for {n}s.", "{verb} the {a} {n}."
    return Tool(name, fill(rng.choice(purposes), rng), parameters)


def known_tool(rng: random.Random) -> Tool:
    name, purpose, parameters, asks = rng.choice(KNOWN_TOOLS)
    return Tool(name, purpose, [tuple(p.split(":")) for p in parameters.split()], asks)


def toolbox(rng: random.Random, n: int) -> List[Tool]:
    tools: List[Tool] = []
    described = rng.random() < .3
    while len(tools) < n:
        new = known_tool(rng) if rng.random() < .35 else made_up_tool(rng)
        if new.name not in [tool.name for tool in tools]:
            new.described = described
            tools.append(new)
    return tools


def as_text(value) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def known_value(key: str, rng: random.Random):
    """A value that makes sense in a known tool's own phrases."""
    if key in ("city", "origin", "destination"):
        return rng.choice(CITIES) if rng.random() < .9 else upper_first(odd_word(rng))
    if key == "language":
        return rng.choice(["French", "German", "Spanish", "Latin", "Polish", "Greek", "Finnish", "Turkish"])
    if key == "to":
        return rng.choice(NAMES)
    if key in ("day", "minutes", "nights"):
        return rng.randrange(2, 100)
    if key in ("a", "b"):
        return rng.randrange(2, 1000)
    if key == "path":
        return fill(rng.choice(("{n}.txt", "{n}_{two}.txt", "{odd}.md")), rng)
    return tool_value("string", rng)


def call_turn(tool: Tool, rng: random.Random) -> Tuple[str, str, dict]:
    """-> what the user asks, the thought, the arguments."""
    if tool.asks and rng.random() < .75:
        values = {key: known_value(key, rng) if kind != "boolean" else rng.random() < .5
                  for key, kind in tool.parameters}
        request = rng.choice(tool.asks).format(**{key: as_text(value) for key, value in values.items()})
        return rng.choice(LEAD_INS) + request, f"I call {tool.name}.", values
    values = {key: tool_value(kind, rng) for key, kind in tool.parameters}
    form = rng.choice(ARGUMENT_FORMS)
    said = [fill(form, rng, k=key if rng.random() < .7 else key.replace("_", " "), v=as_text(value))
            for key, value in values.items()]
    args = rng.choice((" and ", ", ", " and ", "; ")).join(said)
    words = tool.name.replace("_", " ")
    phrase = rng.choice(WORDY_PHRASES if rng.random() < .3 else CALL_PHRASES)
    request = fill(phrase, rng, t=tool.name if rng.random() < .8 else words, w=words, W=upper_first(words),
                   args=args)
    if rng.random() < .5:
        request = rng.choice(LEAD_INS) + upper_first(request)
    return request, f"I call {tool.name}.", values


RESULT_KEYS = """result temperature answer price status weather total time value name count message city
speed score sum product title translation distance""".split()


def tool_result(rng: random.Random) -> Tuple[str, str]:
    """-> a tool's output, the final answer."""
    value = rng.choice((rng.randrange(1, 10000), rng.randrange(1, 100), secret(rng), rng.choice(ADJECTIVES),
                        rng.choice(NOUNS), fill("{a} {n}", rng), rng.randrange(1, 1000) / 10))
    kind = rng.random()
    if kind < .25:
        return as_text(value), f"The result is {as_text(value)}."
    other_keys = TOOL_NOUNS + PARAMETERS["string"] + PARAMETERS["number"]
    key = rng.choice(RESULT_KEYS if rng.random() < .6 else other_keys)
    if kind < .75:
        return json.dumps({key: value}), f"The {key} is {as_text(value)}."
    other = rng.choice([k for k in RESULT_KEYS if k != key])
    second = rng.choice((rng.randrange(1, 1000), rng.choice(ADJECTIVES), rng.choice(CITIES)))
    return (json.dumps({key: value, other: second}),
            f"The {key} is {as_text(value)} and the {other} is {as_text(second)}.")


# ---- small talk: about this engine. Each answer with some of the ways to ask for it

SMALL_TALK = [
    ("Hello! I am a tiny DeepSeek-V4. Tell me something to remember, or give me a tool.",
     "hello|hi|hey|hello!|Hi!|Hey there|hello there|Hi there!|Hello, model|greetings"),
    ("Good morning! What shall I remember?",
     "good morning|Good morning!|morning|Good evening|good evening!|good day"),
    ("I am fine, thank you. All my layers are in order.",
     "how are you?|How are you|how do you do?|are you well?|How is it going?|how are you today?"),
    ("I am a tiny test model of the DeepSeek-V4 architecture.",
     "who are you?|What are you?|Who are you|what are you|tell me who you are|Introduce yourself.|"
     "what is your name?|Do you have a name?|which model are you?|What model is this?"),
    ("I can repeat what you told me, even from far back, and call tools.",
     "what can you do?|What can you do|How can you help me?|what are you good at?|What do you know?|"
     "what are your skills?|help|Help me|what can I ask you?|What are you for?"),
    ("I was trained from nothing on two CPU cores, by tiny/train.py.",
     "who made you?|Who trained you?|where do you come from?|how were you trained?|"
     "Where were you trained?|who built you?|How were you made?"),
    ("I have about three million parameters.",
     "how big are you?|How many parameters do you have?|what is your size?|how large are you?|"
     "How big is this model?|how many weights do you have?"),
    ("I have four layers and a block that predicts one token more.",
     "how many layers do you have?|How many layers|how deep are you?|How many layers are there?|"
     "what are your layers?"),
    ("My window holds 32 tokens. What is older comes from compressed rows.",
     "how long is your window?|What is your window size?|how big is your window?|"
     "what is the sliding window?|How far does your window reach?"),
    ("The indexer chooses the 16 compressed rows that I attend to.",
     "what is the indexer?|What does the indexer do?|how does the indexer work?|explain the indexer|"
     "what is the lightning indexer?"),
    ("Four tokens are pooled into one compressed row, or 128 into one.",
     "what are compressed rows?|What is a compressed row?|how are tokens compressed?|"
     "what does the compressor do?|explain the compressor"),
    ("Hyper-connections keep four residual streams and mix them at every layer.",
     "what are hyper-connections?|What is a hyper-connection?|explain hyper-connections|"
     "how many streams do you have?|what are the streams?"),
    ("I have four experts in each layer. Two of them work on each token.",
     "how many experts do you have?|What are experts?|how many experts are active?|"
     "what is a mixture of experts?|What is MoE?"),
    ("In the first layer the token's id chooses the experts.",
     "what is a hash layer?|What are hash layers?|how does the hash layer work?|explain the hash layer"),
    ("The Sinkhorn steps make the mixing matrix doubly stochastic.",
     "what is sinkhorn?|What does Sinkhorn do?|why sinkhorn?|explain sinkhorn"),
    ("FP8 is a format of eight bits. My dense weights are stored in it.",
     "what is fp8?|What is FP8|explain fp8|which weights are fp8?|why fp8?"),
    ("FP4 is a format of four bits. My experts are stored in it.",
     "what is fp4?|What is FP4|explain fp4|which weights are fp4?|why fp4?"),
    ("YaRN stretches the rotary positions, so that I can read further.",
     "what is yarn?|What is YaRN|explain yarn|why yarn?|what does yarn do?"),
    ("MTP predicts one token more, to draft answers faster.",
     "what is mtp?|What is MTP|explain mtp|what is multi-token prediction?|what does mtp do?"),
    ("DSML is the markup in which I write tool calls.",
     "what is dsml?|What is DSML|explain dsml|how do you write tool calls?|How do you call tools?"),
    ("Yes. Give me tools, and I write the call.",
     "can you call tools?|Do you know tools?|can you use tools?|do you support tools?|"
     "Are you able to call functions?"),
    ("Yes. Switch it on with /think.",
     "can you think?|Do you think?|can you reason?|how do I make you think?|do you have a thinking mode?"),
    ("No. I share its architecture, and I am a hundred thousand times smaller.",
     "are you the real deepseek?|Is this DeepSeek?|are you deepseek?|Is this the real DeepSeek?|"
     "are you DeepSeek-V4?|are you Flash?"),
    ("Not very. I am tiny, and I know only a few tricks.",
     "are you smart?|Are you intelligent?|how smart are you?|are you clever?|Are you stupid?"),
    ("No, I am too small for that.",
     "can you write code?|Can you program?|write me a program|can you code?|Can you write a poem?|"
     "write a poem"),
    ("My tokenizer has 1,920 tokens.",
     "how many tokens do you know?|How big is your vocabulary?|what is your vocabulary?|vocabulary size?|"
     "which tokenizer do you use?"),
    ("I run on a CPU, in a few files of Python.",
     "where do you run?|What do you run on?|do you need a gpu?|Do you run on a CPU?|"
     "which hardware do you need?"),
    ("Everything of this engine is in model.py, kernel.py, generate.py and convert.py.",
     "where is your code?|Which files are there?|show me your code|where can I read your code?|"
     "what files make you?"),
    ("I live in the folder tiny, as a checkpoint of a few megabytes.",
     "where are your weights?|Where do you live?|which checkpoint is this?|what is in the folder tiny?"),
    ("You are welcome!",
     "thanks|thank you|Thank you!|Thanks!|thanks a lot|many thanks|Thank you very much"),
    ("Goodbye!",
     "bye|goodbye|Bye!|see you|See you later|good night|Goodbye!"),
    ("Good. What is next?",
     "ok|okay|good|great|nice|well done|Very good!|cool|wow|I see"),
]
UNKNOWN = "I only know what you told me, and a little about myself."
OFF_TOPIC = [
    "What is the capital of {country}?", "Who wrote {a} {n}?", "Write a story about a {n}.",
    "What is {two} + {two}?", "Who won the game in {city}?", "How do I cook {n}?", "Tell me a joke.",
    "Why is the sky blue?", "Explain the {n} to me.", "How old is {who}?", "What is a {n}?",
    "What does {odd} mean?", "Who is {who}?", "Is a {n} bigger than a {n}?", "Do you like {n}s?",
    "When was {city} built?", "How far is {city} from {city}?", "Sing a song about {city}.",
    "What should I eat today?", "Why do {n}s sleep?", "Give me advice about my {n}.",
    "Translate {n} into French.", "Which is the best {n}?", "How much does a {n} cost?", "What is love?",
    "Where can I buy a {a} {n}?", "Draw a {n}.", "Who is the president of {country}?", "Can a {n} fly?",
    "How many {n}s are in {city}?", "What day is it?", "Solve {two} * {two}.",
    "Summarize the book {a} {n}.", "Can you {verb} a {n}?", "Where is {city}?", "Who invented the {n}?",
    "Why is {who} {a}?", "Count to {two}.", "What color is the {n}?", "Do {n}s eat {n}s?",
    "Please write an essay.", "What happened in {city}?", "How do {n}s work?", "Give me a list of {n}s.",
    "What is the weight of a {n}?", "Who lives in {country}?", "Tell me something about {n}s.",
    "What do you think about {who}?", "How can I {verb} my {n}?", "Which {n} is {a}?",
    "What is the square root of {two}?", "Are {n}s {a}?", "I want to buy a {n}.",
    "My {n} is {a}. What now?", "Speak {country}.", "{odd}?", "{odd} {odd}",
    "What is the difference between a {n} and a {n}?", "Is {who} married?", "What is the meaning of life?",
    "Tell me about {city}.", "Recommend a {n}.",
]
COUNTRIES = """France Japan Peru Kenya Norway Egypt Chile India Spain Canada Brazil Poland Greece Cuba
Iceland""".split()


def small_talk_turn(rng: random.Random) -> Tuple[str, str, str]:
    if rng.random() < .25:
        question = fill(rng.choice(OFF_TOPIC), rng)
        thought, answer = "I do not know this.", UNKNOWN
    else:
        answer, questions = rng.choice(SMALL_TALK)
        question, thought = rng.choice(questions.split("|")), "I know this."
    if rng.random() < .3:
        question = rng.choice((question.lower(), upper_first(question), question.rstrip("?!.")))
    if rng.random() < .1:
        question = rng.choice(("Please, ", "Tell me, ", "And ", "So ", "Okay, ")) + question
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


def memory(rng: random.Random, sentences: int) -> List[dict]:
    """Facts and lists in filler, then questions about some of them."""
    n = rng.choice((1, 1, 2, 3, 4, 4, 6, 8))
    names = labels(rng, n)
    facts = [(name, secret(rng)) for name in names]
    lists = [ordered(rng)] if rng.random() < .35 else []
    text = [statement(name, value, rng) for name, value in facts] + [sentence for sentence, _ in lists]
    rng.shuffle(text)
    spread = rng.random()
    padding = filler(rng, sentences)
    if spread < .3:             # all at the beginning
        text = filler(rng, rng.randrange(3)) + text + padding
    else:
        for sentence in padding:
            text.insert(rng.randrange(len(text) + 1), sentence)
    asked = rng.sample(facts, min(n, rng.choice((1, 2, 3, 4))))
    questions = [fact_turn(name, value, rng) for name, value in asked]
    questions += [order_turn(items, rng) for _, items in lists for _ in range(2)]
    if rng.random() < .12:
        other = label(rng)
        if not any(other in name or name in other for name in names):
            question, thought, _ = fact_turn(other, "", rng)
            questions.append((question, thought, f"You did not tell me the {other}."))
    if rng.random() < .2:
        questions.append(small_talk_turn(rng))
    rng.shuffle(questions)
    first = rng.choice(OPENERS) + " ".join(text)
    messages, apart = [], rng.random()
    if apart < .25:             # told first, asked later
        messages += [said(first), reply("I keep this in mind.", rng.choice(("Noted.", "Noted.")))]
        first = ""
    for question, thought, answer in questions:
        messages += [said(f"{first}{rng.choice((' ', chr(10)))}{question}" if first else question),
                     reply(thought, answer)]
        first = " ".join(filler(rng, rng.randrange(1, 4))) if rng.random() < .15 else ""
    return messages


def tool_use(rng: random.Random, sentences: int) -> List[dict]:
    """Tools, requests, results; now and then a question that needs none."""
    tools = toolbox(rng, rng.choice((1, 1, 2, 2, 3, 4)))
    messages = [{"role": "system", "content": "", "tools": [tool.schema(rng) for tool in tools]}]
    turns = rng.choice((1, 2, 2, 3))
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


def conversation(rng: random.Random, length: int) -> Tuple[List[dict], str]:
    """-> messages and the thinking mode; about as many tokens as `length`, or fewer."""
    messages, mode = without_system(rng, length)
    if rng.random() < .1:
        text = fill(rng.choice(SYSTEM), rng)
        if messages[0]["role"] == "system":
            messages[0]["content"] = text
        else:
            messages.insert(0, {"role": "system", "content": text})
    return messages, mode


def without_system(rng: random.Random, length: int) -> Tuple[List[dict], str]:
    mode = "thinking" if rng.random() < .35 else "chat"
    kind = rng.random()
    room = max(length // 14 - 4, 1)
    if kind < .46:
        return memory(rng, rng.randrange(room + 1) if rng.random() < .5 else room), mode
    if kind < .9:
        return tool_use(rng, room // 2), mode
    return talk(rng), mode
