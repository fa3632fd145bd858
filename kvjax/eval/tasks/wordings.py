"""How needles are worded. Development and test rows never share a wording.

A wording is (statement, question, beginning of the answer); {v} stands for the value.
"""

Wording = tuple[str, str, str]

NEEDLES: dict[str, tuple[Wording, ...]] = {
    "dev": (
        (
            "The serial number of the brass telescope is {v}.",
            "What is the serial number of the brass telescope?",
            "The serial number of the brass telescope is",
        ),
        (
            "Martha's library card carries the number {v}.",
            "Which number does Martha's library card carry?",
            "Martha's library card carries the number",
        ),
        (
            "To reach the lighthouse keeper, one has to dial {v}.",
            "What does one have to dial to reach the lighthouse keeper?",
            "To reach the lighthouse keeper, one has to dial",
        ),
    ),
    "test": (
        (
            "The licence number of the green motorboat is {v}.",
            "What is the licence number of the green motorboat?",
            "The licence number of the green motorboat is",
        ),
        (
            "Parcel {v} was left at the bakery for Mr Tanaka.",
            "Which parcel was left at the bakery for Mr Tanaka?",
            "At the bakery, Mr Tanaka was left parcel",
        ),
        (
            "The observatory's archive lists the comet under the entry {v}.",
            "Under which entry does the observatory's archive list the comet?",
            "The observatory's archive lists the comet under the entry",
        ),
    ),
}
"""A number of seven digits, stated once."""

PASSKEYS: dict[str, tuple[Wording, ...]] = {
    "dev": (
        (
            "The door code is {v}. Keep it in mind: {v} is the door code.",
            "What is the door code?",
            "The door code is",
        ),
        (
            "Please note the secret number {v}. Again, the secret number is {v}.",
            "What is the secret number?",
            "The secret number is",
        ),
    ),
    "test": (
        (
            "The vault number is {v}. Do not forget it, {v} is the vault number.",
            "What is the vault number?",
            "The vault number is",
        ),
        (
            "Your access number is {v}. Once more: your access number is {v}.",
            "What is the access number?",
            "The access number is",
        ),
    ),
}
"""A number of five digits, stated twice."""

FACTS: dict[str, tuple[tuple[str, str, str, tuple[str, ...]], ...]] = {
    "dev": (
        (
            "The expedition finally found the silver crown under the old {v}.",
            "Where did the expedition find the silver crown?",
            "The expedition found the silver crown under the old",
            ("bridge", "windmill", "chapel", "harbour", "oak tree"),
        ),
        (
            "At the village fair, Ingrid won a prize for her {v}.",
            "For what did Ingrid win a prize at the village fair?",
            "At the village fair, Ingrid won a prize for her",
            ("apple cake", "wooden flute", "red pumpkin", "clay horse", "paper lantern"),
        ),
        (
            "The ferry captain used to keep a {v} in his cabin.",
            "What did the ferry captain use to keep in his cabin?",
            "The ferry captain used to keep a",
            ("grey parrot", "broken violin", "chess board", "glass bottle", "small piano"),
        ),
    ),
    "test": (
        (
            "The museum in Halden keeps the duke's letters in a {v}.",
            "Where does the museum in Halden keep the duke's letters?",
            "The museum in Halden keeps the duke's letters in a",
            ("copper box", "leather trunk", "stone cellar", "locked drawer", "blue cabinet"),
        ),
        (
            "On her first day at the mill, Rosa lost her {v}.",
            "What did Rosa lose on her first day at the mill?",
            "On her first day at the mill, Rosa lost her",
            ("wedding ring", "left shoe", "silver watch", "straw hat", "garden key"),
        ),
        (
            "The best season to visit the island of Orm is {v}.",
            "When is the best season to visit the island of Orm?",
            "The best season to visit the island of Orm is",
            ("late autumn", "early spring", "the winter", "the rainy month", "midsummer"),
        ),
    ),
}
"""A fact in words, and what it may be."""

BINDINGS: dict[str, tuple[str, str, str, str, str]] = {
    "dev": (
        "The code {v} belongs to {key}.",
        "Which code belongs to {key}?",
        "Which codes belong to {key}?",
        "To {key} belongs the code",
        "To {key} belong the codes",
    ),
    "test": (
        "The number {v} is assigned to {key}.",
        "Which number is assigned to {key}?",
        "Which numbers are assigned to {key}?",
        "The number assigned to {key} is",
        "The numbers assigned to {key} are",
    ),
}
"""A number {v} of a name {key}: statement; question for one, for several; answers likewise."""

LISTS: dict[str, tuple[str, str, str]] = {
    "dev": (
        "The key of the room {key} is {v}.",
        "What is the key of the room {key}?",
        "The key of the room {key} is",
    ),
    "test": (
        "The price of the ticket {key} is {v}.",
        "What is the price of the ticket {key}?",
        "The price of the ticket {key} is",
    ),
}
"""A line of a list, and how its number is asked for."""

KEYS = (
    *("amber", "basil", "cobalt", "dahlia", "ember", "falcon", "ginger", "hazel", "indigo"),
    *("jasper", "kelp", "lilac", "maple", "nickel", "onyx", "pepper", "quartz", "raven"),
    *("saffron", "thistle", "umber", "velvet", "willow", "yarrow", "zinnia", "acorn"),
    *("birch", "clover", "dune", "elder", "fern", "grove", "heron", "iris", "juniper"),
    *("koala", "lotus", "meadow", "nettle", "otter", "pebble", "quail", "reed", "sage"),
    *("tulip", "urchin", "violet", "wren", "yew", "zephyr", "anchor", "bramble", "cedar"),
    *("delta", "egret", "flint", "garnet", "harbor", "island", "jewel", "kettle"),
)
"""Words that name things; also the vocabulary of the common words task."""

LONG_NUMBERS: dict[str, tuple[Wording, ...]] = {
    "dev": (
        (
            "The account of the choir has the number {v}.",
            "Which number does the account of the choir have?",
            "The account of the choir has the number",
        ),
        (
            "The parking permit of the violinist is {v}.",
            "What is the parking permit of the violinist?",
            "The parking permit of the violinist is",
        ),
    ),
    "test": (
        (
            "The tracking number of the marble statue is {v}.",
            "What is the tracking number of the marble statue?",
            "The tracking number of the marble statue is",
        ),
        (
            "The insurance policy of the circus has the number {v}.",
            "Which number does the insurance policy of the circus have?",
            "The insurance policy of the circus has the number",
        ),
    ),
}
"""A number of sixteen digits, stated once."""

PHRASES: dict[str, tuple[tuple[str, str, str, tuple[tuple[str, ...], ...]], ...]] = {
    "dev": (
        (
            'The secret sentence of the spies is "{v}".',
            "What is the secret sentence of the spies?",
            'The secret sentence of the spies is "',
            (
                ("seven", "nine", "twelve", "forty"),
                ("brown", "tired", "brave", "wet"),
                ("monkeys", "sailors", "painters", "goats"),
                ("pushed", "followed", "sold", "polished"),
                ("a",),
                ("heavy", "round", "yellow", "golden"),
                ("piano", "barrel", "wagon", "statue"),
                ("towards", "beyond", "around"),
                ("town", "noon", "school", "winter"),
            ),
        ),
    ),
    "test": (
        (
            'The motto of the rowing club is "{v}".',
            "What is the motto of the rowing club?",
            'The motto of the rowing club is "',
            (
                ("three", "eight", "eleven", "sixty"),
                ("quiet", "clever", "hungry", "purple"),
                ("otters", "bakers", "dragons", "widows"),
                ("carried", "painted", "chased", "buried"),
                ("the",),
                ("broken", "silver", "narrow", "salty"),
                ("ladder", "trumpet", "kettle", "carpet"),
                ("across", "under", "before"),
                ("snow", "dawn", "church", "supper"),
            ),
        ),
    ),
}
"""A phrase of nine words: what may stand in the place of each."""

SERIES: dict[str, tuple[tuple[str, str, str, tuple[str, ...]], ...]] = {
    "dev": (
        (
            "The crew of the rescue boat consists of {v}.",
            "Who makes up the crew of the rescue boat?",
            "The crew of the rescue boat consists of",
            ("Alma", "Bruno", "Celia", "Dag", "Elin", "Fergus", "Greta", "Hugo", "Ines", "Klara"),
        ),
        (
            "For the soup of the harvest feast one needs {v}.",
            "What does one need for the soup of the harvest feast?",
            "For the soup of the harvest feast one needs",
            ("leeks", "barley", "parsley", "beans", "mustard", "cream", "turnips", "garlic"),
        ),
    ),
    "test": (
        (
            "The jury of the flower show consists of {v}.",
            "Who makes up the jury of the flower show?",
            "The jury of the flower show consists of",
            (
                "Oskar",
                "Paula",
                "Rufus",
                "Sibyl",
                "Tilda",
                "Ulric",
                "Verna",
                "Wilma",
                "Abel",
                "Nora",
            ),
        ),
        (
            "In the drawer of the clockmaker there are {v}.",
            "What is there in the drawer of the clockmaker?",
            "In the drawer of the clockmaker there are",
            ("springs", "pliers", "coins", "pearls", "matches", "stamps", "buttons", "keys"),
        ),
    ),
}
"""A series of things in one sentence, and what they may be."""

SUMMARIES: dict[str, tuple[str, ...]] = {
    "dev": (
        "Give a short summary of the text above.",
        "What is this text about? Answer in a few sentences.",
    ),
    "test": (
        "Summarise the passage above briefly.",
        "Say in two or three sentences what the passage above tells us.",
    ),
}
"""How a summary is asked for."""
