// Texts that are long enough for a cache to be worth compressing, with something to find in them.

const NOTES = [
  "The lighthouse at Skarvholm was built in 1871, of granite that came by barge from the mainland. Its first keeper, Anders Lund, wrote down the weather four times a day for thirty-one years. His notebooks fill two shelves in the parish hall.",
  "Most of what he wrote is wind and cloud. On some days there is a ship, rarely two. He spelled the names as he heard them through the fog, so that historians still argue about a brig that he called the Merry Window.",
  "The lamp burned rape-seed oil until 1889 and paraffin after that. A clockwork turned the lens once in ninety seconds, and had to be wound every five hours. Lund slept in pieces, as he put it, and thought no worse of it.",
  "In the winter of 1893 the sea froze as far as one could see. The mail came over the ice on a sledge, and with it a letter from the authority in the capital: the store room was to have a lock, and the lock was to have a number.",
  "Lund chose a number that he would not forget and that nobody would guess. He wrote it on the inside of the clock case, where it can be read to this day. The code of the store room is 48213.",
  "The authority never asked for it. The store room held rope, glass, oil, a flag for every country that had a consul in the town, and, after the spring of 1894, a barrel of apples that had come ashore and that nobody had claimed.",
  "There was also a cat. It appears first as an expense, half a krone for fish, and then every week for eleven years. When it died, in the hard March of 1905, the wind column of the notebook is empty for one day, the only gap in four thousand pages.",
  "Ships were the reason for all of it, and ships went by without stopping. The fishing boats knew the rocks. It was the strangers who needed the light: timber from the north, salt from the south, and once a circus, whose elephant was seen on deck by three people and believed by one.",
  "The fog signal came late. It was a bell first, struck by a weight that somebody had to wind, and from 1911 a siren that ran on compressed air. The farms on the mainland asked for it to be moved. It was not moved, and after a year nobody could sleep without it.",
  "Water was the other trouble. The rock has no spring. Rain ran from the roof into a cistern of slate, and in dry summers a barrel was brought with the post. Lund measured it with a notched stick, and the notches are numbered in a hand that grows smaller every year.",
  "A painter spent the autumn of 1898 in the boat house. He left four pictures as rent. Two were burned for their frames in the winter of the ice, one hangs in the town, and the last is nailed, face down, beneath the table in the kitchen, where a visiting child discovered it in 1974.",
  "His daughter Ingrid took over the notebooks when his eyes failed, and later the lamp. Her entries are longer. She counted birds, drew the ice, and once, without a word about it, pressed a flower between two days in June.",
  "She married the pilot from the next island, who rowed over on Sundays when the sea let him. For some years there are two hands in the notebooks, one upright and one leaning, and they do not always agree about the wind. A note in the margin says: he is wrong, but it is his birthday.",
  "During the war the lamp was dark. The keeper had orders to put it out and to keep it ready, which is harder than to let it burn. He polished the lens every morning for five years. On the night when it was lit again people stood on the quay of the town, eleven miles away, and counted the flashes aloud.",
  "The station was made automatic in 1958. The last keeper rowed away on a calm morning, and wrote that he had left the door on the latch, in case somebody should need a dry place. Walkers use it still.",
  "Today the tower belongs to the parish. In summer one may climb it for a small sum, and on clear days see the mainland, the barges, and the quarry in which the granite was cut. The notebooks are shown on request.",
].join("\n\n");

const LIST = Array.from({ length: 40 }, (_, i) => {
  const names = ["Ada", "Bo", "Carla", "Dmitri", "Elif", "Farid", "Grete", "Hugo"];
  const fruit = ["plums", "quinces", "medlars", "pears", "apples", "figs", "cherries"];
  return `Row ${i + 1}: ${names[i % 8]} brought ${((i * 37) % 90) + 10} ${fruit[(i * 3) % 7]} on day ${(i * 5) % 28 + 1}.`;
}).join("\n");

export const EXAMPLES = [
  { title: "A number hidden in a long text", text: `${NOTES}\n\nWhat is the code of the store room?` },
  { title: "A long list", text: `${LIST}\n\nWho brought fruit in row 23, and what was it?` },
  { title: "Something to sum up", text: `${NOTES}\n\nSum up this text in three sentences.` },
];
