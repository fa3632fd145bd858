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
