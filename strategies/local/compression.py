"""Updates in fewer bytes: a wrapper of any method that sends one.

Seide, Fu, Droppo, Li, Yu, "1-Bit Stochastic Gradient Descent", Interspeech 2014; Karimireddy, Rebjock, Stich, Jaggi,
"Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019: what one round's rounding loses is
added to the next round's update before that is rounded. Only the trunk is rounded; head rows and batch normalisation
are small, and a running variance has no room for errors.
"""

from dataclasses import replace

from common.wire.quantization import Form, rounded
from common.wire.records import Groups


def compressed(update: Groups, unsent: Groups, form: Form) -> tuple[Groups, Groups]:
    """The update as it is sent, and what is left for the next one.

    Args:
        update: New minus received.
        unsent: What earlier rounds left.
    """
    if form == "float32" or update.trunk is None:
        return update, Groups()
    wanted = update.trunk if unsent.trunk is None else update.trunk + unsent.trunk
    sent = rounded(wanted, form)
    return replace(update, trunk=sent, form=form), Groups(trunk=wanted - sent)
