"""Which emoji the demo models learn, and what people call them. Plain data; knows no pictures.

All names are Unicode CLDR's English short names unless said otherwise.
"""


def names(text):
    """The names of a `|`-separated list that may run over several lines."""
    return {" ".join(name.split()) for name in text.split("|")}


# The 100 of the short training run (--core): clear shapes that people ask for first.
CORE = names("""
    red apple | green apple | banana | grapes | watermelon | lemon | strawberry | cherries |
    pineapple | peach | tomato | carrot | ear of corn | avocado | broccoli | bread | croissant |
    cheese wedge | hamburger | french fries | pizza | hot dog | doughnut | cookie | birthday cake |
    cupcake | soft ice cream | lollipop | hot beverage | beer mug | dog face | cat face |
    mouse face | rabbit face | fox | bear | panda | lion | tiger face | cow face | pig face |
    frog | monkey face | chicken | penguin | owl | butterfly | honeybee | lady beetle | turtle |
    octopus | fish | dolphin | elephant | sunflower | tulip | rose | cactus | evergreen tree |
    deciduous tree | mushroom | grinning face | smiling face with sunglasses |
    smiling face with heart-eyes | crying face | enraged face | robot | ghost | skull | red heart |
    blue heart | green heart | yellow heart | star | sun | crescent moon | cloud | rainbow |
    snowman | fire | globe showing Americas | automobile | bus | bicycle | airplane | rocket |
    sailboat | house | guitar | soccer ball | basketball | balloon | wrapped gift | crown | key |
    light bulb | red circle | blue circle | blue square | red square
    """)

# Emoji subgroups that are taken whole ...
WHOLE_SUBGROUPS = set("""
    animal-mammal animal-bird animal-amphibian animal-reptile animal-marine animal-bug plant-flower
    plant-other food-fruit food-vegetable food-prepared food-asian food-sweet drink dishware
    transport-water musical-instrument sport game light-video tool clothing cat-face face-costume
    """.split())

# ... but for these ...
DROPPED = names("""
    rosette | wilted flower | leaf fluttering in wind | microbe | paw prints | guide dog | moose |
    goose | wing | worm | hatching chick | front-facing baby chick | ox | water buffalo |
    pig nose | two-hump camel | ram | mouse | rat | stuffed flatbread | falafel | cooking |
    shallow pan of food | fondue | butter | salt | oden | dango | fish cake with swirl |
    fortune cookie | moon cake | takeout box | sake | clinking glasses | pouring liquid | mate |
    tamale | curry rice | amphora | canoe | ferry | motor boat | long drum | maracas | flute |
    softball | flying disc | cricket game | field hockey | lacrosse | goal net | diving mask |
    skis | sled | curling stone | magic wand | slot machine | joystick | nesting dolls |
    club suit | diamond suit | heart suit | spade suit | chess pawn | mahjong red dragon |
    flower playing cards | joker | film frames | film projector | video camera |
    camera with flash | magnifying glass tilted right | diya lamp | hammer and pick |
    hammer and wrench | chains | hook | link | clamp | white cane | pick | boomerang | lab coat |
    sari | one-piece swimsuit | briefs | shorts | bikini | woman’s clothes | clutch bag |
    shopping bags | thong sandal | flat shoe | woman’s sandal | ballet shoes | hair pick |
    military helmet | prayer beads | rescue worker’s helmet | safety vest |
    grinning cat with smiling eyes | cat with tears of joy | cat with wry smile | kissing cat |
    weary cat | ogre | goblin | alien monster | honey pot | custard | cut of meat |
    bowl with spoon | green salad | pot of food | rice ball | roasted sweet potato |
    steaming bowl | leafy green | beans | ginger root | pea pod | garlic | flatbread |
    canned food | bento box | rice cracker | beverage box | tumbler glass | teacup without handle |
    baby bottle | jar | oyster | coral | seal | cockroach | fly | ewe | boar | bison | mammoth |
    badger | empty nest | sheaf of rice | herb | hyacinth | lotus | white flower | notebook |
    chestnut | olive | ring buoy | speedboat | passenger ship | carpentry saw | nut and bolt |
    balance scale | boxing glove | yo-yo | fishing pole | goggles | gloves | kimono |
    folding hand fan
    """)

# ... and single emoji of the other subgroups.
PICKED = names("""
    grinning face | grinning face with big eyes | beaming face with smiling eyes |
    face with tears of joy | slightly smiling face | winking face | smiling face with halo |
    smiling face with hearts | smiling face with heart-eyes | star-struck | face blowing a kiss |
    face with tongue | money-mouth face | thinking face | zipper-mouth face | neutral face |
    face with rolling eyes | sleeping face | face with medical mask | nauseated face | hot face |
    cold face | exploding head | cowboy hat face | partying face | smiling face with sunglasses |
    nerd face | face with monocle | frowning face | face with open mouth | pleading face |
    crying face | loudly crying face | face screaming in fear | enraged face |
    smiling face with horns | skull | heart with arrow | broken heart | red heart | orange heart |
    yellow heart | green heart | blue heart | purple heart | black heart | kiss mark | collision |
    thumbs up | thumbs down | waving hand | clapping hands | flexed biceps | brain | tooth | bone |
    eyes | eye | mouth | ear | nose | baby | Santa Claus | globe showing Americas | compass |
    snow-capped mountain | volcano | beach with umbrella | desert island | brick | rock | wood |
    house | house with garden | office building | castle | Tokyo tower | church | tent |
    circus tent | ferris wheel | fountain | locomotive | train | bus | ambulance | fire engine |
    police car | taxi | automobile | sport utility vehicle | pickup truck | delivery truck |
    tractor | racing car | motorcycle | motor scooter | bicycle | kick scooter | skateboard |
    roller skate | wheel | vertical traffic light | stop sign | fuel pump | airplane | parachute |
    helicopter | satellite | rocket | flying saucer | bellhop bell | luggage | hourglass done |
    watch | alarm clock | full moon | crescent moon | sun | sun with face | ringed planet | star |
    cloud | sun behind cloud | cloud with rain | cloud with lightning | tornado | rainbow |
    umbrella | high voltage | snowflake | snowman | fire | droplet | water wave | jack-o-lantern |
    Christmas tree | sparkles | balloon | party popper | ribbon | wrapped gift | trophy |
    1st place medal | artist palette | framed picture | yarn | bell | megaphone | musical note |
    microphone | headphone | radio | mobile phone | telephone | battery | laptop |
    desktop computer | printer | keyboard | floppy disk | optical disk | closed book | open book |
    green book | blue book | orange book | books | scroll | newspaper | coin | money bag |
    money with wings | credit card | envelope | package | postbox | pencil | pen | paintbrush |
    crayon | briefcase | file folder | calendar | clipboard | pushpin | paperclip | scissors |
    wastebasket | locked | unlocked | key | test tube | dna | microscope | telescope | syringe |
    pill | stethoscope | door | window | bed | couch and lamp | chair | toilet | bathtub | broom |
    basket | bucket | soap | toothbrush | sponge | fire extinguisher | shopping cart | warning |
    no entry | radioactive | yin yang | peace symbol | recycling symbol | check mark button |
    cross mark | red question mark | red circle | orange circle | yellow circle | green circle |
    blue circle | purple circle | brown circle | black circle | red square | orange square |
    yellow square | green square | blue square | purple square | brown square |
    black large square | chequered flag | triangular flag
    """)

# Names that people would type instead of the short name.
ALIASES = {
    "automobile": ["car", "red car"],
    "sport utility vehicle": ["blue car", "suv"],
    "hot beverage": ["coffee", "cup of coffee", "cup of tea"],
    "ear of corn": ["corn"],
    "honeybee": ["bee"],
    "lady beetle": ["ladybug"],
    "evergreen tree": ["pine tree", "tree"],
    "deciduous tree": ["tree", "green tree"],
    "doughnut": ["donut"],
    "aubergine": ["eggplant"],
    "soft ice cream": ["ice cream cone", "ice cream"],
    "pizza": ["slice of pizza"],
    "hamburger": ["burger", "cheeseburger"],
    "french fries": ["fries"],
    "dog face": ["dog", "puppy"],
    "cat face": ["cat", "kitten"],
    "mouse face": ["mouse"],
    "rabbit face": ["rabbit", "bunny"],
    "tiger face": ["tiger"],
    "horse face": ["horse"],
    "cow face": ["cow"],
    "pig face": ["pig"],
    "monkey face": ["monkey"],
    "dragon face": ["green dragon"],
    "T-Rex": ["dinosaur", "tyrannosaurus"],
    "sauropod": ["dinosaur", "brontosaurus"],
    "spouting whale": ["whale"],
    "baby chick": ["chick", "yellow chick"],
    "fire engine": ["fire truck"],
    "wrapped gift": ["gift", "present"],
    "red heart": ["heart"],
    "smiling face with sunglasses": ["cool face"],
    "slightly smiling face": ["smiley", "smiling face"],
    "grinning face": ["happy face", "smiley face"],
    "frowning face": ["sad face"],
    "enraged face": ["angry face", "red angry face"],
    "high voltage": ["lightning bolt", "lightning"],
    "full moon": ["moon"],
    "globe showing Americas": ["earth", "globe", "planet earth"],
    "ringed planet": ["saturn", "planet"],
    "watermelon": ["slice of watermelon"],
    "clapper board": ["movie clapper"],
    "jack-o-lantern": ["pumpkin", "halloween pumpkin"],
    "cheese wedge": ["cheese", "piece of cheese"],
    "glass of milk": ["milk"],
    "beer mug": ["beer", "glass of beer"],
    "wine glass": ["glass of wine", "red wine"],
    "bread": ["loaf of bread"],
    "locked": ["padlock", "closed lock"],
    "unlocked": ["open lock"],
    "airplane": ["plane"],
    "mobile phone": ["phone", "smartphone"],
    "desktop computer": ["computer"],
    "closed book": ["red book", "book"],
    "couch and lamp": ["couch", "sofa"],
    "face with tears of joy": ["laughing face"],
    "money bag": ["bag of money"],
    "flexed biceps": ["muscle", "strong arm"],
    "light bulb": ["lamp"],
    "snow-capped mountain": ["mountain"],
    "flying saucer": ["ufo"],
    "sunflower": ["yellow flower"],
    "blossom": ["flower"],
    "tulip": ["pink tulip"],
    "rose": ["red rose"],
    "cherries": ["cherry"],
    "red apple": ["apple"],
    "green apple": ["apple that is green"],
    "banana": ["yellow banana"],
    "carrot": ["orange carrot"],
    "locomotive": ["steam train", "steam locomotive"],
    "pile of poo": ["poop"],
    "bathtub": ["bath"],
    "shopping cart": ["shopping trolley"],
    "crescent moon": ["yellow moon"],
    "black large square": ["black square"],
    "stop sign": ["red stop sign"],
    "1st place medal": ["gold medal"],
    "wastebasket": ["trash can"],
    "package": ["cardboard box", "box"],
    "framed picture": ["painting"],
    "optical disk": ["cd", "disc"],
    "vertical traffic light": ["traffic light"],
    "cooked rice": ["bowl of rice"],
    "spaghetti": ["pasta", "plate of spaghetti"],
    "cup with straw": ["soda", "soft drink"],
    "gem stone": ["diamond", "gem"],
    "magnifying glass tilted left": ["magnifying glass"],
    "american football": ["football"],
    "soccer ball": ["football ball"],
    "pool 8 ball": ["eight ball"],
    "game die": ["dice"],
    "bullseye": ["dart board", "target"],
    "water pistol": ["water gun"],
}

# Names that take no article, in lower case or as CLDR writes them.
NO_ARTICLE = names("""
    eyes | cherries | grapes | french fries | fries | pancakes | blueberries | peanuts |
    chopsticks | glasses | sunglasses | jeans | socks | scissors | books | sparkles |
    clapping hands | fork and knife | clinking beer mugs | bacon | sushi | popcorn | broccoli |
    spaghetti | ice | shaved ice | wood | fire | soap | dna | crossed swords | tennis | ping pong |
    badminton | ice hockey | bowling | locked | unlocked | cooked rice | performing arts |
    thumbs up | thumbs down | money with wings | milk | beer | pasta | lightning | red wine |
    saturn | planet earth | dice | Santa Claus | Tokyo tower | high voltage | star-struck | poop |
    hourglass done | water wave | coffee | corn | cheese | ice cream
    """)
