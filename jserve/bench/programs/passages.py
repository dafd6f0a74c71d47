"""Short texts that the programs read: twelve places, with what each is known for.

Written for these programs; numbers are rounded.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A text about a place, and what it says."""

    name: str
    country: str
    population: int
    known_for: str
    text: str


PLACES = (
    Place(
        "Bergen",
        "Norway",
        290000,
        "wooden harbour houses",
        "Bergen lies on the west coast of Norway, between seven mountains and the sea. About "
        "290000 people live there. Traders of the Hanseatic League bought dried fish in its "
        "harbour for four hundred years, and the row of wooden houses that they left, Bryggen, "
        "still leans over the quay. It rains on more than two hundred days of the year, and a "
        "small railway carries visitors up to a view over the roofs and the fjord.",
    ),
    Place(
        "Cusco",
        "Peru",
        430000,
        "walls of fitted stone",
        "Cusco stands in a high valley of Peru, 3400 metres above the sea. About 430000 people "
        "live in the city, which was the capital of the Inca state until the Spanish came in 1533. "
        "Churches were built on top of palaces, and the lower walls of many streets are still "
        "Inca work: large stones, cut so exactly that no mortar holds them. Most travellers pass "
        "through on their way to Machu Picchu.",
    ),
    Place(
        "Kanazawa",
        "Japan",
        460000,
        "a landscape garden",
        "Kanazawa is a city of about 460000 people on the western coast of Japan. A rich family "
        "ruled it for almost three centuries and spent its money on tea, theatre and craft rather "
        "than on war. Its garden, Kenrokuen, took two hundred years to finish; in winter its pines "
        "are held up by ropes so that wet snow does not break them. Nearly all of the gold leaf "
        "that Japan uses is beaten there.",
    ),
    Place(
        "Fes",
        "Morocco",
        1200000,
        "leather tanneries",
        "Fes, in the north of Morocco, has about 1200000 inhabitants. Its old town is a maze of "
        "more than nine thousand lanes, too narrow for cars, where mules carry gas bottles and "
        "bread. Hides are still tanned in round stone pits full of lime and dye, as they were in "
        "the eleventh century. A mosque school that was founded in 859 is often called the oldest "
        "university that still teaches.",
    ),
    Place(
        "Hobart",
        "Australia",
        250000,
        "a port for Antarctica",
        "Hobart is the capital of Tasmania, the island state of Australia, and about 250000 people "
        "live around its deep harbour. Ships that supply the Antarctic stations leave from here, "
        "and so do the yachts of a race that starts in Sydney every December. Behind the city "
        "stands Mount Wellington, often white in winter. A private museum that was dug into a "
        "cliff has become its best known sight.",
    ),
    Place(
        "Ghent",
        "Belgium",
        265000,
        "an altarpiece",
        "Ghent is a city of about 265000 people in the north of Belgium, where two rivers meet. In "
        "the fourteenth century it was larger than London, because its weavers turned English wool "
        "into cloth for all of Europe. The cathedral keeps an altarpiece of twelve panels by the "
        "brothers van Eyck, which has been stolen, sold and hidden so often that people call it "
        "the most wanted painting of the world.",
    ),
    Place(
        "Valparaiso",
        "Chile",
        300000,
        "hillside lifts",
        "Valparaiso climbs forty-two hills above a bay of the Pacific in Chile. About 300000 "
        "people live there. Before the Panama Canal was opened, every ship that had rounded Cape "
        "Horn stopped in its harbour, and sailors of many nations settled on the slopes. Small "
        "lifts on rails, some of them from 1883, still carry people between the flat streets at "
        "the water and painted houses above.",
    ),
    Place(
        "Tartu",
        "Estonia",
        97000,
        "a university",
        "Tartu, in the south of Estonia, has about 97000 inhabitants, and nearly one in six of "
        "them studies. Its university was founded in 1632 by a king of Sweden and has been the "
        "centre of the country's thinking ever since; the first song festival, from which the "
        "national movement grew, was held there in 1869. An old observatory on the hill was once "
        "one end of a chain of measurements that told the size of the earth.",
    ),
    Place(
        "Zanzibar City",
        "Tanzania",
        220000,
        "carved doors",
        "Zanzibar City lies on an island off Tanzania and has about 220000 inhabitants. In its old "
        "part, Stone Town, houses are built of coral stone, and their doors are carved and set "
        "with brass, because a door showed the wealth of a family. Cloves made the island rich in "
        "the nineteenth century, when most of the world's came from its trees. The market for "
        "slaves was closed in 1873, and a church stands in its place.",
    ),
    Place(
        "Oaxaca",
        "Mexico",
        270000,
        "dark sauces",
        "Oaxaca is a city of about 270000 people in a southern valley of Mexico, at 1550 metres. "
        "Its buildings are of a green volcanic stone that shines after rain, and low because the "
        "earth shakes often. Cooks there make seven kinds of mole, a sauce that may hold thirty "
        "things, among them chocolate and burnt chillies. Above the city lie the squares and tombs "
        "of Monte Alban, which Zapotecs built on a mountain that they had made flat.",
    ),
    Place(
        "Galway",
        "Ireland",
        85000,
        "street music",
        "Galway, on the west coast of Ireland, has about 85000 inhabitants. Fourteen merchant "
        "families ran it in the Middle Ages and traded wine with Spain, and an arch at the quay is "
        "still called Spanish. Musicians play in its streets in every weather, and the Irish "
        "language is heard in shops, because villages that never gave it up begin just outside. "
        "Oysters are eaten at a festival in September.",
    ),
    Place(
        "Luang Prabang",
        "Laos",
        55000,
        "morning alms",
        "Luang Prabang stands on a tongue of land between the Mekong and a smaller river in the "
        "north of Laos. About 55000 people live there. It was the seat of kings until 1975, and "
        "more than thirty temples with roofs that reach almost to the ground are still in use. "
        "Before sunrise monks walk through the streets in a long line, and people who kneel beside "
        "the road give each of them a little rice.",
    ),
)
