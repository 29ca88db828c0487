"""Limits of the identification of an equation (integrate.py, identification.py), set by measurements."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Sizes of the samples and tolerances. Errors are relative to persistence."""

    # Samples: cells in all windows together, and the largest number of windows.
    regression_cells: int = 2**15
    shooting_cells: int = 2**12
    step_test_cells: int = 2**13
    max_regression_windows: int = 256
    max_shooting_windows: int = 32
    max_step_test_windows: int = 32
    min_windows: int = 4
    max_bound_trajectories: int = 64  # trajectories whose range bounds the predictions
    num_held_out: int = 16  # trajectories and frames on which a fit is validated
    film_values: int = 2**22  # of a channel, in the films of data with noise
    noisy_cells: int = 2**13  # in the windows of data with noise, that the integrator is fitted to
    noisy_windows: int = 64  # most of these windows
    noisy_frames: int = 8  # of each of these
    shooting_frames: int = 2  # frames that the integrator is fitted to, from each start
    max_bytes: int = 2**26  # of the terms evaluated at once

    # Regression of central differences in time.
    weight_exponents: tuple[float, ...] = (1, 2, 3)  # of the weights of windows; each gives one regression
    slow_change: float = 0.01  # of the mean square change: windows that change less have no larger weight
    residual_factors: tuple[float, ...] = (1.5, 3.0)  # allowed residual over that of the whole library
    # High derivatives mimic the error of a difference in time. They are used only if they reduce the residual
    # by `high_order_gain`, and the plain terms leave more than `plain_residuals`. Its first value is tried
    # first, the second one if no model has an error below `good_error` then: a smaller error may be that of
    # the solver that made the data, as for diff_react2d.
    high_order_gain: float = 3.0
    plain_residuals: tuple[float, float] = (0.1, 0.0)
    good_error: float = 0.1

    # Steps of the integrator per frame.
    stability_limit: float = (
        2.7  # step times rate; RK4 is stable to 2.78 (real axis) and 2.83 (imaginary axis)
    )
    median_step_error: float = 3e-4  # of the change of a frame, that halving the step may alter: the median
    max_step_error: float = 0.05  # and the largest over windows
    noise: float = 1e-6  # of the change of a frame, added to test whether short waves grow
    max_noise_growth: float = (
        1.2  # of the largest mode of that noise, relative to half the step or to its start
    )
    max_doublings: int = 3  # of the steps, if the long rollouts need them
    min_improvement: float = 0.7  # more steps are kept only if they reduce the error below 0.7 times
    suspicious_ratio: float = (
        20  # error of long over that of short rollouts, above which more steps are tried
    )
    suspicious_error: float = 0.1  # the same for the error of long rollouts itself

    # Terms added to the first model.
    candidates_per_channel: int = 6
    max_added_terms: int = 12
    min_term_gain: float = 0.04  # of the squared error, that a new term has to remove
    max_growths: int = 3
    min_growth_gain: float = 0.5  # terms are added once more only if the error fell below 0.5 times


LIMITS = Limits()
