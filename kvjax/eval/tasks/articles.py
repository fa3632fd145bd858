"""Short news articles that are made up, and what is asked about them. Splits share none of it."""

from typing import NamedTuple


class Article(NamedTuple):
    """An article with slots, which are drawn for every prompt."""

    text: str
    """{town}, {name}, {number} and {cause} are its slots."""
    causes: tuple[str, ...]
    questions: tuple[tuple[str, str, str], ...]
    """(question, beginning of the answer, the slot it asks for)."""


TOWNS: dict[str, tuple[str, ...]] = {
    "dev": (
        *("Ostergard", "Kelvedon", "Marrow Bay", "Sandvoll", "Pellerin", "Brackwater"),
        *("Dunmore", "Tirrano", "Holmsey", "Vasterby", "Carrick Head", "Lindfold"),
    ),
    "test": (
        *("Norrhaven", "Aldbury", "Seleny", "Port Amory", "Grauwiller", "Mistelbach"),
        *("Tarnow Hill", "Ruskea", "Coldwell", "Fanoe", "Esterbrook", "Velmont"),
    ),
}
NAMES: dict[str, tuple[str, ...]] = {
    "dev": (
        *("Agnes Hollis", "Bernard Quayle", "Cecilia Thorn", "Duncan Ferris", "Edith Marlowe"),
        *("Frank Oduya", "Gloria Stanmore", "Henrik Vale", "Irene Castleton", "Julian Peck"),
    ),
    "test": (
        *("Alice Brandon", "Carl Winther", "Dora Penhallow", "Emil Sandberg", "Flora Mackie"),
        *("George Alvarez", "Helen Strand", "Isaac Rowntree", "Joan Fairley", "Kurt Lomax"),
    ),
}

ARTICLES: dict[str, tuple[Article, ...]] = {
    "dev": (
        Article(
            "Fire destroys warehouse in {town}\n\n"
            "A fire destroyed a furniture warehouse in {town} on Tuesday night. Nobody was hurt, "
            "but the firm lost {number} beds. The fire brigade said that the blaze was started "
            "by {cause}. The warehouse is owned by {name}, who told reporters that the company "
            "would rent another building until spring. Smoke was seen from the motorway, and two "
            "schools stayed closed in the morning.",
            ("a faulty heater", "a burning candle", "an old lamp", "a gas bottle"),
            (
                ("What started the blaze in {town}?", "The blaze was started by", "cause"),
                ("Who owns the warehouse in {town}?", "The warehouse is owned by", "name"),
                ("How many beds did the firm in {town} lose?", "The firm lost", "number"),
            ),
        ),
        Article(
            "Ferry from {town} delayed for hours\n\n"
            "Passengers of the night ferry from {town} had to wait: the ship was delayed for "
            "eight hours by {cause}. The ship was carrying {number} people. Her captain is "
            "{name}, who apologised over the loudspeakers and had soup handed out. The line "
            "promised to pay back half of every ticket. It is the second delay of this month; "
            "the harbour office has asked for a report.",
            ("thick fog", "a broken anchor", "a strike", "a damaged door"),
            (
                (
                    "What delayed the ferry from {town}?",
                    "The ship was delayed for eight hours by",
                    "cause",
                ),
                ("Who is the captain of the ferry from {town}?", "Her captain is", "name"),
                (
                    "How many people was the ferry from {town} carrying?",
                    "The ship was carrying",
                    "number",
                ),
            ),
        ),
        Article(
            "Record harvest around {town}\n\n"
            "Farmers around {town} have brought in {number} tonnes of potatoes, more than ever "
            "before. The head of the growers' union is {name}; to her the success is due to "
            "{cause}. Prices in the shops have fallen by a third since July. Some of the crop "
            "will be turned into starch, and the rest goes abroad by rail.",
            ("a wet June", "new seed", "warm nights", "better soil"),
            (
                ("What is the success around {town} due to?", "The success is due to", "cause"),
                (
                    "Who is the head of the growers' union in {town}?",
                    "The head of the growers' union is",
                    "name",
                ),
                (
                    "How many tonnes of potatoes were brought in around {town}?",
                    "Farmers have brought in",
                    "number",
                ),
            ),
        ),
        Article(
            "Museum in {town} opens again\n\n"
            "After four years of work the sea museum in {town} has opened its doors again. Its "
            "roof had been damaged by {cause}. The repair cost {number} crowns. The museum is "
            "directed by {name}, who led the first visitors through the hall, where a whale's "
            "skeleton hangs from the ceiling. Children come in free until the end of the year.",
            ("a storm", "a falling tree", "a flood", "heavy snow"),
            (
                (
                    "What damaged the roof of the museum in {town}?",
                    "Its roof had been damaged by",
                    "cause",
                ),
                ("Who directs the museum in {town}?", "The museum is directed by", "name"),
                (
                    "How many crowns did the repair of the museum in {town} cost?",
                    "The repair cost",
                    "number",
                ),
            ),
        ),
        Article(
            "Power cut leaves {town} in the dark\n\n"
            "For most of Sunday evening {town} was without electricity. The power was lost in "
            "{number} homes, and the network company blamed {cause}. In the hospital the "
            "generators took over at once. The mayor is {name}, who thanked the engineers, who "
            "had climbed the masts in heavy rain. By midnight all the lamps were burning again.",
            ("a squirrel", "a loose cable", "a burnt fuse", "an excavator"),
            (
                (
                    "What was blamed for the power cut in {town}?",
                    "The network company blamed",
                    "cause",
                ),
                ("Who is the mayor of {town}?", "The mayor is", "name"),
                (
                    "In how many homes in {town} was the power lost?",
                    "The power was lost in",
                    "number",
                ),
            ),
        ),
        Article(
            "Swimmer from {town} breaks record\n\n"
            "A swimmer from {town} has crossed the strait in less time than anyone before. The "
            "swimmer is called {name}, teaches music, needed {number} minutes and was held up "
            "only by {cause}. A boat with a doctor went along. In the evening there was a dinner "
            "in the town hall, and the school has been given a day off.",
            ("jellyfish", "a cargo ship", "cold water", "a strong current"),
            (
                ("Which swimmer from {town} broke the record?", "The swimmer is called", "name"),
                (
                    "What held up the swimmer from {town}?",
                    "The swimmer was held up only by",
                    "cause",
                ),
                (
                    "How many minutes did the swimmer from {town} need?",
                    "The swimmer needed",
                    "number",
                ),
            ),
        ),
    ),
    "test": (
        Article(
            "Bridge in {town} closed\n\n"
            "The old bridge over the river in {town} has been closed to lorries. Inspectors "
            "found that the pillars had been weakened by {cause}. Until now the daily traffic "
            "was {number} cars. The chief engineer is {name}, who expects the work to take until "
            "autumn. A shuttle bus takes people across on foot in the meantime, and shopkeepers "
            "fear for their trade.",
            ("rust", "ice", "river mud", "beetles"),
            (
                (
                    "What had weakened the pillars of the bridge in {town}?",
                    "The pillars had been weakened by",
                    "cause",
                ),
                ("Who is the chief engineer in {town}?", "The chief engineer is", "name"),
                ("How large was the daily traffic in {town}?", "The daily traffic was", "number"),
            ),
        ),
        Article(
            "Bakery in {town} wins national prize\n\n"
            "A small bakery in {town} has won a prize for the best rye bread of the country. The "
            "jury praised above all {cause}. The baker is {name}, who has been at the oven since "
            "the age of fifteen. Every week the shop sells {number} loaves. The prize comes with "
            "a golden rolling pin and a trip to the capital. On Saturday there will be free "
            "rolls for everyone.",
            ("the dark crust", "the wild yeast", "the smell of honey", "the stone oven"),
            (
                ("What did the jury praise in {town}?", "The jury praised above all", "cause"),
                ("Who is the baker in {town}?", "The baker is", "name"),
                (
                    "How many loaves does the bakery in {town} sell every week?",
                    "Every week the shop sells",
                    "number",
                ),
            ),
        ),
        Article(
            "Train derails near {town}\n\n"
            "A goods train came off the rails near {town} early on Friday. According to the "
            "railway the derailment was caused by {cause}. It had been loaded with {number} "
            "sacks of cement. The driver was {name}, who was unhurt and walked to the next "
            "station to raise the alarm. The line stays blocked until Monday; buses are running "
            "instead.",
            ("a broken rail", "a fallen rock", "a stray cow", "a jammed switch"),
            (
                (
                    "What caused the derailment near {town}?",
                    "The derailment was caused by",
                    "cause",
                ),
                ("Who was the driver of the train near {town}?", "The driver was", "name"),
                (
                    "How many sacks of cement was the train near {town} loaded with?",
                    "It had been loaded with",
                    "number",
                ),
            ),
        ),
        Article(
            "Library of {town} moves house\n\n"
            "The public library of {town} is moving into the old post office. The stock of "
            "{number} books is carried over by volunteers, who stand in a chain from door to "
            "door. The old rooms were given up because of {cause}. The librarian is {name}, who "
            "hopes to open in May with a reading by local poets. A café on the ground floor is "
            "planned as well.",
            ("damp walls", "high rents", "noisy neighbours", "a leaking pipe"),
            (
                (
                    "Why were the old rooms of the library of {town} given up?",
                    "The old rooms were given up because of",
                    "cause",
                ),
                ("Who is the librarian of {town}?", "The librarian is", "name"),
                (
                    "How many books are in the stock of the library of {town}?",
                    "It is a stock of",
                    "number",
                ),
            ),
        ),
        Article(
            "Rescuers save hikers above {town}\n\n"
            "Mountain rescuers have brought a group of hikers down to {town} after a night in "
            "the snow. The group had lost its way because of {cause}. A helicopter found them at "
            "{number} metres above the sea. The rescue was led by {name}, who said that bright "
            "jackets had saved them. All of them left the hospital on the same day.",
            ("a wrong map", "a dead phone", "low clouds", "a missing sign"),
            (
                (
                    "Why had the group above {town} lost its way?",
                    "The group had lost its way because of",
                    "cause",
                ),
                ("Who led the rescue above {town}?", "The rescue was led by", "name"),
                (
                    "At how many metres were the hikers above {town} found?",
                    "A helicopter found them at",
                    "number",
                ),
            ),
        ),
        Article(
            "Zoo of {town} welcomes twins\n\n"
            "Two bear cubs were born in the zoo of {town} last month, and from today they can be "
            "seen. Their arrival had been kept secret because of {cause}. The keeper is {name}, "
            "who feeds them from a bottle every three hours. A vote on their names drew {number} "
            "letters from all over the country. The zoo is open until six in the evening.",
            ("a nervous mother", "building work", "a winter cold", "the crowds"),
            (
                (
                    "Why had the cubs' arrival in {town} been kept secret?",
                    "Their arrival had been kept secret because of",
                    "cause",
                ),
                ("Who is the keeper in {town}?", "The keeper is", "name"),
                (
                    "How many letters did the vote in {town} draw?",
                    "The vote on their names drew",
                    "number",
                ),
            ),
        ),
    ),
}
