"""The check of a site's class names against the study's vocabulary; the coordinator makes the same comparison."""

from polyclinic.client.check.contract import DataComparison
from polyclinic.client.check.findings import CheckArea
from polyclinic.client.check.training import PlannedTraining
from polyclinic.client.connection.exit_codes import ClientExitCode
from polyclinic.common.contract import LabelDeclaration
from polyclinic.common.patients.opt_out import SITE_FILE
from polyclinic.common.vocabulary import map_words_to_classes


def check_site_words(
    area: CheckArea, planned: PlannedTraining, declaration: LabelDeclaration, comparison: DataComparison
) -> None:
    """Add a fault for each class of the site that is not in the study's vocabulary, with the line to write.

    Without a vocabulary, the names are compared with those of other hospitals only at the roll call.

    Args:
        declaration: The site's classes, with the site's own names.
    """
    words = declaration.canonical_names
    vocabulary = planned.plan.vocabulary
    synonyms = map_words_to_classes(words, vocabulary or {})
    classes = [synonyms.get(word, word) for word in words]
    area.facts["words"] = dict(zip(declaration.names, classes, strict=True))
    if planned.assumed:
        return
    if vocabulary is None:
        others = f"{planned.origin} has no [vocabulary], so other hospitals may use other words"
        area.passed.append(f"words: {', '.join(words)}; {others}")
        return
    for fault in comparison.word_faults:
        area.add_fault(ClientExitCode.WORDS, f"{fault.where}: {fault.problem}", fault.remedy)
    matches = list[str]()
    for word, name in zip(words, classes, strict=True):
        if name in vocabulary:
            matches.append(word if word == name else f"{word} as {name}")
        if word != name and (definition := vocabulary[name].definition):
            area.add_note(
                f'"{word}" is a synonym of "{name}": {definition}', f"If it is not the same, correct {SITE_FILE}."
            )
    if matches:
        area.passed.append(f"words: {', '.join(matches)}; {planned.origin} has them in its [vocabulary]")
