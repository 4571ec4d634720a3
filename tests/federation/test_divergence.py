"""Training that diverges is noticed, once, with what to try; training that goes well is not."""

import math
import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from _helpers.project import run_project
from _helpers.toy import CLASSES, CLIENTS, GivenCohorts, Toy, run, tiny_encoder

from pfl_lightning import SequentialEngine
from pfl_lightning.federation.divergence import DivergenceGuard, remedies
from pfl_lightning.federation.evaluation import Evaluation
from pfl_lightning.methods import METHODS, DualFed, FedAvg, FedPAC
from pfl_lightning.metrics import EvalMetrics
from pfl_lightning.robust import MultiKrum
from pfl_lightning.state.image import Growth

STILL = Growth(None, 1.0, "")


def play(method, rounds, stop=False, ratio=1000.0, **options):
    """The federation after a run, and the warnings of divergence."""
    loop = GivenCohorts(range(CLIENTS), stop_on_divergence=stop, max_update_ratio=ratio)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        federation = run(method, rounds, loop=loop, data=Toy(batch_size=4, drop_last=True), **options)
    return federation, [str(w.message) for w in caught if "diverges" in str(w.message)]


def federation(method=FedAvg, batch_size=4, engine=None):
    """As much of a federation as the guard asks for, without a run."""
    data = SimpleNamespace(batch_size=batch_size)
    models = [method(tiny_encoder((6,)), CLASSES)]
    trainer, evaluation = SimpleNamespace(callback_metrics={}), Evaluation(validation_scores=judged(1000))
    engine = engine or SequentialEngine()
    known = {"models": models, "data": data, "trainer": trainer, "evaluation": evaluation}
    return SimpleNamespace(**known, engine=engine, lying=frozenset(), robust=None)


def judged(samples):
    return {0: EvalMetrics(0.5, 1.0, samples)}


def test_dualfed_with_small_batches_says_what_the_paper_has():
    _, said = play(partial(DualFed, epochs=5, lr=1.0), 3)
    assert len(said) == 1, said
    assert said[0].startswith("round 1: the training diverges: the mean of train/cross_entropy is ")
    assert "batch_size 256, as in the paper: with batches of 4 a round takes up to 64 times as many steps" in said[0]
    assert "contrastive=2 (the paper's for Office-Home) instead of 40; an lr below 1; " in said[0]
    assert "gradient_clip_val=1.0 of the engine. FederatedLoop(stop_on_divergence=True) ends such runs" in said[0]


def test_a_run_stops_if_it_shall():
    stopped, said = play(partial(DualFed, epochs=5, lr=1.0), 3, stop=True)
    assert (stopped.trainer.current_epoch, len(said)) == (1, 1)


@pytest.mark.parametrize("method", [FedAvg, FedPAC, DualFed], ids=lambda method: method.__name__)
def test_training_that_goes_well_is_not_reported(method):
    finished, said = play(partial(method, lr=0.02), 5, stop=True)
    assert (finished.trainer.current_epoch, said) == (5, [])


def test_the_loss_explodes():
    guard, of = DivergenceGuard(), federation()
    assert guard.exceeded({"train/loss": 140.0, "train/cross_entropy": 2.0}, STILL, of) is None
    assert guard.limits == {"train/loss": 1400.0, "train/cross_entropy": 10 * math.log(CLASSES)}
    assert guard.exceeded({"train/loss": 1300.0}, STILL, of) is None
    expected = "the mean of train/loss is 3e+03, and that of the first round was 140, or less"
    assert guard.exceeded({"train/loss": 3e3}, STILL, of) == expected


def test_the_weights_jump():
    """The server's weights become a thousand times larger in round 2."""

    class Jumps(FedAvg):
        def make_update(self, context, before):
            if context.round == 2:
                with torch.no_grad():
                    self.head.weight.mul_(1e4)
            return super().make_update(context, before)

    _, said = play(partial(Jumps, epochs=1), 4, ratio=None, limit_val_batches=0)
    assert len(said) == 1
    assert "round 3: the training diverges: weights.head/weight on the server has grown by a factor of" in said[0]


def fall(samples, losses):
    """What is said of an accuracy that falls to that of guessing, and of the run."""
    guard, of = DivergenceGuard(), federation()
    of.evaluation = Evaluation(validation_scores=judged(samples))
    for accuracy, loss in zip((0.55, 0.2, 0.2, 0.2), losses, strict=True):
        what = guard.falls({"val_accuracy/mean": accuracy}, of, loss)
    return what, guard, of


def test_a_fall_within_the_chance_of_few_samples_is_none():
    assert fall(8, (1.0, 2.0, 3.0, 4.0))[0] is None  # three of eight
    assert fall(200, (1.0, 2.0, 3.0, 4.0))[0].startswith("the mean accuracy is 0.2, as by guessing")


def test_a_run_whose_loss_falls_is_not_said_to_diverge():
    for losses, diverges in (((1.0, 0.8, 0.6, 0.5), False), ((1.0, 1.2, 1.4, 1.5), True), ((math.nan,) * 4, True)):
        what, guard, of = fall(200, losses)
        with pytest.warns(UserWarning, match="the mean accuracy is 0.2") as said:
            guard.report(what, 3, of)
        (text,) = {str(warning.message) for warning in said}
        assert ("the training diverges" in text) == diverges
        assert ("although the mean training loss has fallen from 1 to 0.5 since" in text) != diverges


def test_the_accuracy_falls_to_that_of_guessing():
    guard, of = DivergenceGuard(), federation()
    falls = [guard.falls({"val_accuracy/mean": accuracy}, of) for accuracy in (0.3, 0.7, 0.2, 0.2, 0.6, 0.22, 0.21)]
    assert falls == [None] * 7
    found = guard.falls({"test_accuracy/mean": 0.2}, of)
    assert found == "the mean accuracy is 0.2, as by guessing, for 3 rounds; it was 0.7"
    assert guard.falls({"val_accuracy/mean": math.nan}, of) is None


def test_the_loss_of_the_evaluated_models_explodes():
    guard, of = DivergenceGuard(), federation()
    assert guard.falls({"val_accuracy/mean": 0.5, "val_loss/mean": 3.0, "test_loss/mean": 150.0}, of) is None
    found = guard.falls({"val_accuracy/mean": 0.5, "val_loss/mean": 3.0, "test_loss/mean": 3e3}, of)
    assert found == "the mean loss of the evaluated models is 3e+03, and guessing reaches 1.61, or less"


def test_a_resumed_run_remembers():
    guard, again, of = DivergenceGuard(), DivergenceGuard(), federation()
    guard.exceeded({"train/loss": 2.0}, STILL, of)
    with pytest.warns(UserWarning, match="round 4: the training diverges: x. Try an lr below 0.01; gradient_clip_val"):
        guard.report("x", 3, of)
    again.load_state_dict(guard.state_dict())
    assert again.state_dict() == guard.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again.report("y", 4, of)


def test_what_the_engine_does_is_not_advised():
    guard = DivergenceGuard()
    with pytest.warns(
        UserWarning, match=r"Try batch_size 50, as in the paper: .* up to 5 times .*; an lr below 0.01\. "
    ):
        guard.report("x", 0, federation(FedPAC, batch_size=10, engine=SequentialEngine(gradient_clip_val=1.0)))


def test_where_clients_lie_a_robust_rule_is_the_first_to_try():
    attacked = federation()
    attacked.lying = frozenset([1])
    assert remedies(attacked)[0] == "a robust rule (--model.robust), as some clients send false updates"
    attacked.robust = MultiKrum(byzantine=1)
    assert remedies(attacked) == remedies(federation())


def test_batch_sizes_of_papers():
    known = {method.__name__: method.paper_batch_size for method in METHODS if method.paper_batch_size is not None}
    of_the_first = {"FedPAC": 50, "DualFed": 256, "FedClassAvg": 64, "Calibre": 128, "PFLSSL": 128}
    assert known == of_the_first | {"FedETF": 128, "PFedHN": 64, "GPFL": 10, "FedCP": 10}


def test_a_users_module_at_the_level_of_guessing_goes_on():
    fitted, _ = run_project(FedAvg)
    guard = DivergenceGuard()
    assert [guard.falls({"val_accuracy/mean": 0.2}, fitted) for _ in range(10)] == [None] * 10
