"""Words in the headings and cells of hospitals' tables.

Patterns are matched with text in lower case. :mod:`polyclinic.data.tables.judgement` and
:mod:`polyclinic.data.tables.roles` decide with them what a column or a cell means; a word that is missing is
added here.
"""

import re
from typing import Literal


def _split_into_word_set(text: str) -> frozenset[str]:
    return frozenset(text.split())


# ---------------------------------------------------------------------- headings

NUMBER_WORDS = (
    r"(?:id|uid|nr|no|num|n[uú]mero|num[eé]ro|number|nummer|code|c[oó]digo|key|identifi(?:er|ant|cador)|kennung"
    r"|pseudonym|hash)"
)
_PERSON = r"(?:patient(?:en|in|e)?|pat|pacient[ea]?|paci[eë]nt|paziente|hasta|患者|пациент)"
_PARTICIPANT = r"(?:subject|subj|person(?:en)?|participant|proband(?:en|in)?|individual)"
PATIENT = re.compile(
    rf"(?:{_PERSON}|{_PARTICIPANT}){NUMBER_WORDS}?|pt{NUMBER_WORDS}|mrn|pid|nhs|cpr|ssn|empi|eid|medrecno"
)
"""A word for the patient, alone or with one for a number: ``patient``, ``patientennummer``."""
PATIENT_IN_TWO_WORDS = re.compile(rf"\b(?:pt (?={NUMBER_WORDS}\b)|med(?:ical)? rec(?:ord)?(?: {NUMBER_WORDS})?\b)")
"""Abbreviations that mean the patient only beside a word for a number: ``pt id``, ``medical record number``."""
NUMBERED = re.compile(rf".*{NUMBER_WORDS}|mrn|nhs|cpr|ssn|empi")
BESIDE_PATIENT = re.compile(
    rf"{NUMBER_WORDS}|n|name|of|the|de|du|des|del|der|anon\w*|deid\w*|identified|pseudonym\w*|hashed|unique|dicom"
)
"""Words that leave the heading of a patient what it is. Any other, such as one for an age or a group, does not."""
BEFORE_PATIENT = re.compile(r"study|hospital|clinic|source|site|original|local|internal|coded")
"""Words that do so before the patient: "Study Patient ID" numbers patients, "Patient Study ID" studies."""
_PLAIN_NUMBER = r"(?:id|uid|nr|no|n|num|n[uú]mero|num[eé]ro|number|nummer|identifi(?:er|ant|cador)|kennung)"
PATIENT_NUMBER = re.compile(
    rf"(?:{_PERSON}|{_PARTICIPANT}|pt) ?{_PLAIN_NUMBER}|{_PLAIN_NUMBER} (?:{_PERSON}|{_PARTICIPANT})"
    rf"|(?:mrn|pid|medrecno|med(?:ical)? rec(?:ord)?)(?: {_PLAIN_NUMBER})?"
)
"""Headings of nothing but a plain number of patients: ``patient_id``, ``MRN``. A number of a study, a hospital or a
country, or a code, may be blank for some patients, or repeat."""
PATIENT_OR_EXAM = re.compile(rf"eid(?: {_PLAIN_NUMBER})?")
"""Headings that mean the patient in some tables (UK Biobank), and an exam or encounter in others."""
JOINING = re.compile(r"of|the|de|du|des|del|der")
SPLIT_HEADING = re.compile(r"split|part|partition|set|subset")
SPLIT_WORDS = _split_into_word_set(
    "train training trn learn learning dev devel development val valid validation validierung validate tune tuning "
    "test testing tst holdout hold held out eval evaluation intern internal extern external discovery derivation "
    "replication calibration kalibrierung lern prüf set data cohort kohorte public private publictest privatetest"
)
"""Words of the cells of a column that divides the table into training and test."""
NO_SPLIT_ALONE = _split_into_word_set("set data cohort kohorte out hold held public private")
FINDINGS = re.compile(r"finding|label(?!l?e[dr])|diagnos|class|dx|disease|befund|icd(?![a-z])")
BESIDE_FINDINGS = _split_into_word_set(
    "type typ method methode confirm confirmed certainty confidence date datum duration source basis by from age bmi "
    "bp nyha asa weight income risk location site side comment history familienanamnese"
)
"""Words beside one of :data:`FINDINGS` in a heading that names something else: "diagnosis method", "BMI class"."""
WHOSE_FINDINGS = _split_into_word_set("type typ confirm confirmed from by")
"""Those of :data:`BESIDE_FINDINGS` that may also say which diagnosis it is: "confirmed diagnosis", "disease type"."""
HOSPITAL = re.compile(r"hospi|h[oô]pital|klini|kranken|ospedal|cliniq|clinic(?!al)|institut|facility|standort")
SOURCE_WORDS = _split_into_word_set(
    "site centre center zentrum centro sede source quelle origin herkunft provider cohort dataset haus"
)
NO_SOURCE_WORDS = _split_into_word_set(
    "anatom anatomic anatomical body lesion tumor tumour localization window sex gender geschlecht view position "
    "projection modality side laterality age alter date datum time year url path file history device"
)
NO_ID_WORDS = (NO_SOURCE_WORDS - {"lesion"}) | _split_into_word_set(
    "âge edad fecha zeit birth birthday dob geburtsdatum day count anzahl weight gewicht height größe group gruppe "
    "type typ location ort class category stage grade position status labelled labeled reader rad radiologist rater "
    "annotator observer expert doctor physician arzt ärztin befunder leser operator technician"
)
"""Words in the names of columns that say something about a patient or an image, and number neither."""
CASE = re.compile(r"fall|case|visit|besuch|encounter|episode|exam|untersuchung|accession|auftrag|study|studie")
"""Parts of the names of columns that name a stay or an examination, which is a patient's, but not the patient."""
NO_FINDINGS = _split_into_word_set(
    "age alter âge edad years jahre over über under unter modality modalität laterality side seite left right links "
    "rechts weight gewicht height year jahr date datum ap pa m f w d u patient is"
)
"""Words of which the name of a column without findings consists."""
NO_FINDING_HEADING = re.compile(
    r"(?:patient(?:en|s)?|pat|subject|person|is|biological)?(?:sex|gender|geschlecht|(?:fe)?male|view)(?:code|position)?s?"
    r"|sex[eo]|sesso|geschl|kön|männlich|weiblich|proje[ck]tion\w*"
    r"|train(?:ing|set)?|test(?:set)?|split|exclu\w*|ausschluss|ausgeschl(?:ossen)?"
)
"""A word about sex, view, split or exclusion: a column named with it is none of findings."""
FLAG_WORDS = (SPLIT_WORDS - {"learn", "public", "private"}) | _split_into_word_set(
    "fold folds cv valset heldout intest testing "
    "femenino masculino femme homme feminin masculin féminin mujer hombre femmina maschio donna uomo frau mann weibl "
    "männl woman women man men girl boy fem masc pohlavi pohlaví žena muž cinsiyet kadın erkek płeć kobieta vrouw "
    "kvinna kvinne kvinde mand geslacht kjønn køn spol sukupuoli φύλο пол 性别 男 女 "
    "lateral frontal oblique erect supine prone upright standing sitting seated bedside portable mobile decubitus "
    "stehend liegend liegendaufnahme sitzend seitlich axial sagittal coronal "
    "quality qualität qualité calidad qualità qc qa iqa ok pass passed fail failed bad poor good gut schlecht blurry "
    "blurred unscharf usable readable gradable ungradable adequate inadequate "
    "labeled labelled annotated review reviewed needed verified validated "
    "duplicate duplicated duplikat doublon drop dropped discard discarded remove removed ignore ignored skip keep "
    "reject rejected follow up followup fu baseline verlauf"
)
"""Words of a heading that may say something of the person, the view, the picture's quality or the split."""
BESIDE_FLAG = re.compile(
    r"is|has|in|for|used|use|set|flag|the|of|on|dicom|patient|image|img|picture|scan|by|code|bin|binary|indicator|bool"
    r"|x|ray|xray|cxr|radiograph|aufnahme|exam|photo|foto"
)
"""Words beside these that add nothing."""
FINDING_STEM = re.compile(
    r"pneumon|neumon|pneumot|effusi|erguss|[ée]panchement|derrame|versamento|fluid|nod[uú]l|rundherd|atele[ck]t|ödem"
    r"|œdème|edem|emphys|enfisem|fibros|fra[ck]tur|[ck]ar[cz]ino|melano|n[ae]+v(?:us|i\b)|tumou?r|zyst|cyst|[ck]ardiomeg"
    r"|infiltr|opacit|[ck]onsolid|[^\W\d]{3,}itis\b|[^\W\d]{3,}osis\b|retinopath|glau[ck]om|[ck]atara[ck]t|drusen"
    r"|degenerat|malign|benign|herni|läsion|l[eé]sion|mass\b|masse\b|raumforderung|h[aä]?emorrh|blutung|tuber[ck]ul"
    r"|covid|stenos|[ck]aries|ab[sz]+[ck]?es|metasta|adenom|polyp|ulcer|ulkus"
)
"""Part of the name of a finding in one of several languages."""
READER = re.compile(
    r"r\d+|(?:reader|rater|annotator|observer|radiologist|expert|befunder|arzt|leser)[_ ]?\d*|consensus|konsens"
    r"|majority|mehrheit|adjudicated|gt|groundtruth"
)
"""A word for one of several readers of an image, or for what they agreed on."""
SIDES = (
    _split_into_word_set("right r rt rechts re od droite derecha destra dx dext"),
    _split_into_word_set("left l lt links li os gauche izquierda sinistra sn sin"),
)
"""Words for the right and for the left side, also of the eye (OD, OS)."""

BESIDE_SIDE = _split_into_word_set(
    "eye eyes breast ear knee hip hand foot lung kidney auge brust ohr knie hüfte fuß lunge niere œil oeil sein ojo "
    "mama occhio mammella side seite lado côté lato laterality lateralität"
)
"""Words beside one for a side, which is a finding only if another word says of what: "Left eye", "side r"."""
BOTH_SIDES = _split_into_word_set("both bilateral beide beidseits beidseitig ou deux ambos entrambi")

# ---------------------------------------------------------------------- cells

PART_NAMES = {
    "train": "train",
    "training": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "validierung": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
}
NOBODY = (
    r"(?:unknown|unk|anon(?:[iy]m\w*)?|un(?:bekannte?r?|named|identified)|inconnue?|descon(?:oc|hec)id[oa]|sconosciut[oa]"
    r"|ignot[oa]|onbekend|okänd|uk(?:jent|endt)|tuntematon|nieznan[ya]|neznám[ýá]|bilinmeyen|no name|n n|nobody|noname"
    r"|redact(?:ed)?|removed|deleted|withheld|hidden|masked|blinded|confidential|private|vertraulich|geheim"
    r"|de ?identified|deident|pseudonymi\w+|test|dummy|phantom)"
)
"""A word or two, joined by a space, for a person whose name is not known or was removed, or for no person."""
YES_AND_NO = _split_into_word_set(
    "yes no y n true false t f ja nein j wahr falsch vrai faux oui non vero falso si sí sim não pos neg pos. neg. "
    "positive negative positiv negativ positif négatif present absent vorhanden x xx + ++ ✓ ✔ ✗ ✘"
)
NOT_LOOKED = _split_into_word_set("nr nb n.b. ka")
"""Abbreviations that mean "unknown" in label columns."""
MISSING_CODES = _split_into_word_set("8 9 88 98 99 888 998 999 -1 -8 -9 -88 -98 -99 -888 -999")
"""Numbers by which questionnaires and statistics programs write a missing value."""
ABOUT_PERSON = YES_AND_NO | _split_into_word_set("m f w d u male female männlich weiblich divers pa ap ll lat lateral")
NORMAL = re.compile(
    r"normal(?:e[rsnm]?|befund\w*)?|unauff|unauffällig\w*|unverdächtig\w*|regelrecht\w*|gesund\w*|healthy|negativ[eo]?"
    r"|alters(?:entsprechend|gemäß|gemäss|gerecht)\w*|clear|unremarkable|sano|sain"
)
"""A word that says that nothing was found."""
NORMAL_IN_SHORT = frozenset(("ob", "io", "nad", "wnl", "ras"))
NOT = re.compile(r"kein\w*|ohne|no|without|sans|sin|senza|sem")
ABNORMAL = re.compile(
    r"findings?|abnormal\w*|disease|path\w*|\w*befund\w*|auff\w*|veränderung\w*|krankh\w*|wesent\w*|acute|akut\w*"
    r"|significant|relev\w*|anomal\w*|particularités?|hallazgos?|patológicos?|reperti|achados?"
)
"""Words of which nothing is left when the word before denies them."""
EXAMINED = re.compile(
    r"study|chest|thorax|cxr|x|ray|xray|radiograph|exam|scan|image|lungs?|lunge|heart|controls?|kontrollen?|findings?"
    r"|befund|within|limits"
)
"""Words beside these, which say what is normal."""
Certainty = Literal["denied", "doubted", "past"]
CERTAINTIES: dict[Certainty, re.Pattern[str]] = {
    "denied": re.compile(
        r"(?:kein\w*|no|not|ohne|without|sans|neg(?:ative|\.)?|ausschluss|ausgeschl(?:ossen\w*|\.)|excluded"
        r"|absence of)(?![^\W_]).*|.*[^\w](?:ausgeschlossen|excluded|ruled out|not seen)\W?"
    ),
    "doubted": re.compile(
        r".*\?|\?.*|(?:v\.? ?a\.?|verd(?:acht\w*|\.)|suspect\w*|suspicion|susp\.?|possibl[ey]|probabl[ey]|likely"
        r"|fraglich\w*|rule out|r/o|dd)(?![^\W_]).*|.*[^\w](?:v\. ?a\.?|verdacht|fraglich|suspected|possible)\W?"
    ),
    "past": re.compile(
        r"(?:z\. ?n\.?|zn|zustand nach|st\. ?n\.?|status post|s/p|history of|h/o)(?![^\W_]).*|.*[^\w]z\. ?n\.?"
    ),
}
"""Names that deny a finding, doubt it, or place it in the past."""
DIAGNOSIS_CODE = re.compile(r"([a-z]\d\d(?:\.(?:\d{1,2}|-))?[!*+]?)[ -]?\(?([gvza])?\)?(?: ?[rlb])?")
"""A code of ICD-10-GM and its letter of certainty. Codes of ICD-10-CM that end in a letter have more digits."""
CODE_CERTAINTIES: dict[str, Certainty] = {"a": "denied", "v": "doubted", "z": "past"}
"""Letters behind a code of ICD-10-GM: excluded, suspected, status after. G (confirmed) means the code itself."""
CONFIRMED = frozenset(("g", "gesichert", "confirmed", "certain", "definite"))
UNCONFIRMED = frozenset(CODE_CERTAINTIES).union(
    ("ausschluss", "ausgeschlossen", "verdacht", "zustand nach", "excluded", "ruled out", "suspected", "status after")
)
"""Cells of a column that says how certain the finding or code of another column is."""
_OPINION = r"grad|read|report|assess|evaluat|interpret|analy[sz]|review|diagnos|annotat|label?l"
NOT_ASSESSED = re.compile(
    rf"(?:not|un|in|non|never)[ _-]?(?:yet )?(?:(?:{_OPINION})(?:ed|e?able|ible|tic)?|scorable|usable|sufficient"
    r"|adequate)(?: quality| yet)?"
    r"|(?:nicht|nie|un)[ _-]?(?:lesbar|befundet|beurteil(?:t|bar)|auswertbar|diagnostisch|verwertbar)"
    r"|non[ _-]?(?:interpr[ée]table|[ée]valu[ée]|lu)"
    r"|no (?:reading|grade|view)|cannot (?:be )?(?:grade|read|assess)d?"
)
"""Cells that say that nobody assessed, or nobody could assess, the image."""
POOR_QUALITY = re.compile(r"(?:poor|bad|low)[ _-](?:image[ _-])?quality|schlechte (?:bild)?qualität")
"""Cells that may say the same, or may stand beside findings."""
CODE_OR_PLACEHOLDER = re.compile(r"nv")
"""Abbreviations of a missing value that are, beside other codes, a finding: nevus."""
UNREAD_CODE = re.compile(r"n[bdr]|ka")
"""Abbreviations of "nicht befundet", "not done", "not reported" and "keine Angabe", which may be codes of findings."""
WORD_OR_PLACEHOLDER = re.compile(r"missing|open|offen")
"""Words for a missing value that are also names of findings, such as a missing tooth."""
NO_NAMES = re.compile(
    r"nil|void|empty|blank|missing|pending|open|offen|tb[acd]|todo|unk|x{2,}|k\.? ?a\.?|n\.? ?[adv]\.?|keine angaben?"
    r"|(?:not |un|nicht |non |pas )(?:yet )?(?:read|reported|known|clear|available|applicable|assess(?:ed|able)"
    r"|evaluat(?:ed|able)|done|given|specified|defined|certain|labell?ed|annotated|reviewed|diagnosed"
    r"|interpret(?:ed|able)|evalu[ée]|bekannt|befundet|beurteil(?:t|bar)|angegeben|verf[uü]gbar|disponible"
    r"|renseign[ée])(?: yet)?|undetermined|indeterminate|inconnue?|desconocid[oa]|ausstehend|sans objet"
    r"|(?:no|without|null|missing|see|siehe|voir|kein|ohne) ?(?:report|label|value|data|reading|info(?:rmation)?|result"
    r"|read|record|entry|answer|image|text|befund ?bericht|bericht|wert)s?",
)
"""Cells that mean either that nobody looked or that nothing was seen; which of both is unclear."""
