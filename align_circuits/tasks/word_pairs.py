"""Small lexicons that a language model knows from pretraining, as pairs of a word and its translation."""

import string
from collections.abc import Mapping


def _spaced(pairs: str) -> dict[str, str]:
    """Reads `word:translation` pairs; each word is written with a space before it."""
    return {f" {word}": f" {translation}" for word, translation in (pair.split(":") for pair in pairs.split())}


_NUMBERS = (" zero", " one", " two", " three", " four", " five", " six", " seven", " eight", " nine")

_COMMON = """
    act any are art big but can car cat copy data end event first fit free good health her here history
    hold idea key kind know led leg life limit map mat max must net new not note now off one other out
    part pet post read red rest sad sat select set software star start system table test text time top
    type use war what where who will with without work you your
"""

LEXICONS: Mapping[str, Mapping[str, str]] = {
    "upper case": {f" {word}": f" {word.upper()}" for word in _COMMON.split()},
    "capital letters": {f" {letter}": f" {letter.upper()}" for letter in string.ascii_lowercase},
    "small letters": {f" {letter}": f" {letter.lower()}" for letter in string.ascii_uppercase},
    "digits": dict(zip("0123456789", _NUMBERS, strict=True)),
    "antonyms": _spaced("""
        hot:cold big:small up:down left:right good:bad fast:slow high:low long:short old:young rich:poor
        hard:soft dark:light day:night early:late open:closed in:out on:off true:false black:white happy:sad
        strong:weak wet:dry full:empty first:last love:hate win:lose buy:sell push:pull north:south
        east:west male:female inside:outside above:below before:after always:never start:finish thick:thin
        wide:narrow clean:dirty cheap:expensive deep:shallow easy:difficult near:far same:different
        alive:dead front:back summer:winter war:peace success:failure major:minor positive:negative
        public:private internal:external maximum:minimum increase:decrease remember:forget question:answer
        give:take accept:reject live:die raise:lower
    """),
    "plurals": _spaced("""
        cat:cats dog:dogs car:cars tree:trees house:houses book:books day:days week:weeks year:years
        city:cities country:countries family:families school:schools teacher:teachers student:students
        friend:friends king:kings river:rivers mountain:mountains island:islands bird:birds horse:horses
        plant:plants flower:flowers star:stars planet:planets window:windows door:doors table:tables
        chair:chairs hand:hands eye:eyes man:men woman:women child:children foot:feet tooth:teeth mouse:mice
        person:people leaf:leaves wife:wives life:lives story:stories army:armies baby:babies party:parties
        box:boxes church:churches class:classes game:games song:songs picture:pictures letter:letters
        number:numbers word:words
    """),
    "past tenses": _spaced("""
        go:went see:saw take:took make:made give:gave come:came find:found think:thought tell:told feel:felt
        leave:left bring:brought begin:began keep:kept hold:held write:wrote stand:stood hear:heard
        mean:meant meet:met run:ran pay:paid sit:sat speak:spoke lead:led grow:grew lose:lost fall:fell
        send:sent build:built understand:understood draw:drew break:broke spend:spent rise:rose drive:drove
        buy:bought wear:wore choose:chose eat:ate fly:flew win:won teach:taught sell:sold catch:caught
        fight:fought throw:threw sleep:slept sing:sang forget:forgot know:knew say:said
    """),
    "participles": _spaced("""
        go:going make:making take:taking use:using look:looking play:playing work:working run:running
        walk:walking talk:talking read:reading write:writing eat:eating drink:drinking sleep:sleeping
        sing:singing dance:dancing drive:driving fly:flying swim:swimming build:building learn:learning
        teach:teaching think:thinking feel:feeling speak:speaking listen:listening watch:watching
        wait:waiting help:helping move:moving live:living give:giving call:calling try:trying ask:asking
        turn:turning start:starting grow:growing open:opening hold:holding bring:bringing sit:sitting
        stand:standing lose:losing pay:paying meet:meeting send:sending fall:falling cut:cutting
    """),
    "capitals": _spaced("""
        France:Paris Germany:Berlin Italy:Rome Spain:Madrid England:London Russia:Moscow China:Beijing
        Japan:Tokyo Greece:Athens Egypt:Cairo Ireland:Dublin Austria:Vienna Poland:Warsaw Portugal:Lisbon
        Cuba:Havana Iran:Tehran Iraq:Baghdad Israel:Jerusalem Kenya:Nairobi Norway:Oslo Sweden:Stockholm
        Peru:Lima India:Delhi Ukraine:Kiev Denmark:Copenhagen Hungary:Budapest Scotland:Edinburgh
        Belgium:Brussels Canada:Ottawa Finland:Helsinki Netherlands:Amsterdam Syria:Damascus Korea:Seoul
    """),
    "comparatives": _spaced("""
        big:bigger small:smaller old:older young:younger fast:faster slow:slower high:higher low:lower
        long:longer short:shorter strong:stronger weak:weaker hard:harder soft:softer dark:darker
        light:lighter early:earlier late:later hot:hotter cold:colder warm:warmer cool:cooler rich:richer
        poor:poorer easy:easier good:better bad:worse large:larger great:greater near:nearer close:closer
        deep:deeper wide:wider broad:broader thick:thicker thin:thinner heavy:heavier cheap:cheaper
        safe:safer simple:simpler smart:smarter clear:clearer new:newer tall:taller happy:happier
        quick:quicker bright:brighter
    """),
    "adverbs": _spaced("""
        quick:quickly slow:slowly easy:easily happy:happily sad:sadly careful:carefully clear:clearly
        direct:directly deep:deeply strong:strongly heavy:heavily near:nearly real:really true:truly
        final:finally usual:usually general:generally certain:certainly complete:completely
        perfect:perfectly recent:recently rapid:rapidly sudden:suddenly serious:seriously similar:similarly
        simple:simply special:specially strict:strictly wide:widely full:fully rare:rarely proper:properly
        exact:exactly entire:entirely equal:equally effective:effectively significant:significantly
        frequent:frequently gradual:gradually immediate:immediately natural:naturally physical:physically
        political:politically poor:poorly quiet:quietly safe:safely separate:separately total:totally
        typical:typically
    """),
    "genders": _spaced("""
        king:queen man:woman boy:girl father:mother son:daughter brother:sister husband:wife uncle:aunt
        he:she prince:princess actor:actress male:female men:women boys:girls sons:daughters
        brothers:sisters gentleman:lady god:goddess grandfather:grandmother himself:herself dad:mom Mr:Mrs
        fathers:mothers hero:heroine groom:bride kings:queens bull:cow
    """),
    "agents": _spaced("""
        teach:teacher write:writer read:reader drive:driver sing:singer play:player work:worker lead:leader
        paint:painter own:owner speak:speaker run:runner use:user farm:farmer build:builder manage:manager
        design:designer help:helper fight:fighter train:trainer research:researcher report:reporter
        listen:listener hunt:hunter follow:follower publish:publisher produce:producer consume:consumer
        buy:buyer sell:seller act:actor sail:sailor direct:director edit:editor create:creator
        invent:inventor investigate:investigator visit:visitor program:programmer photograph:photographer
        view:viewer employ:employer win:winner
    """),
}
"""By name: for each word its translation, both as they are written, with the space before them. Digits, which
tokenizers split off, have none. All are single tokens of SmolLM2's tokenizer."""

WORD_TASKS = tuple(name for name in LEXICONS if "letters" not in name and name != "digits")
"""The ten lexicons of words."""
