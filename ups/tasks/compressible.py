"""Compressible flow of an ideal gas in one, two and three dimensions; PDEBench's data. No solver here yet."""

from ups.boundary import PERIODIC
from ups.tasks.task import Array, Task

EQUATION = ("density (∂V/∂t + V·∇V) = -∇pressure + eta lap V + (zeta + eta/3) ∇(∇·V), with the conservation "
            "of mass and of the energy of an ideal gas (adiabatic index 5/3)")
FIELDS = ("density", "pressure", "Vx", "Vy", "Vz")
POSITIVE = ("density", "pressure")
PUBLISHED_1D = {
    "1D_CFD_Rand_Eta1.e-8_Zeta1.e-8_periodic_Train.hdf5": (135485, "ad22fe08b8abc721179dbb34f2cc8b2a"),
    "1D_CFD_Rand_Eta0.01_Zeta0.01_periodic_Train.hdf5": (164672, "2fdd00138f1d7abc794fb953021a9f43"),
    "1D_CFD_Rand_Eta0.1_Zeta0.1_periodic_Train.hdf5": (164668, "45655bd77d006ab539c52b7fbcf099b9"),
}
# the viscosity 1e-8 is published on the finer grid only, under a name that says so
PUBLISHED_2D = {
    "2D_CFD_Rand_M0.1_Eta1e-08_Zeta1e-08_periodic_512_Train.hdf5": (164689,
                                                                    "ae2552864d0856f58dc74132a2f95d20"),
    "2D_CFD_Rand_M0.1_Eta0.01_Zeta0.01_periodic_128_Train.hdf5": (164687, "5b21dcccaef4d2145ca579a71153c580"),
    "2D_CFD_Rand_M0.1_Eta0.1_Zeta0.1_periodic_128_Train.hdf5": (164688, "b2733888745a1d64e36df813e979910b"),
}
PUBLISHED_3D = {
    "3D_CFD_Rand_M1.0_Eta1e-08_Zeta1e-08_periodic_Train.hdf5": (164693, "45892a12d1066d54af74badae55c438e"),
}

FAMILY = (
    Task("cfd1d", FIELDS[:3], 1, PERIODIC, "arrays", tuple(map(Array, FIELDS[:3])),
         "1D_CFD_Rand_Eta{0}_Zeta{0}_periodic_Train.hdf5", ("eta", "zeta"), respell=("1e-08", "1.e-8"),
         equation=EQUATION, positive=POSITIVE, domain=(-1.0, 1.0), resolution=1024, published=PUBLISHED_1D),
    Task("cfd2d", FIELDS[:4], 2, PERIODIC, "arrays", tuple(map(Array, FIELDS[:4])),
         "2D_CFD_Rand_M0.1_Eta{0}_Zeta{0}_periodic_128_Train.hdf5", ("eta", "zeta", "M"),
         constants=(("M", 0.1),),
         respell=("1e-08_periodic_128", "1e-08_periodic_512"), equation=EQUATION, positive=POSITIVE,
         num_frames=21, published=PUBLISHED_2D),
    Task("cfd3d", FIELDS, 3, PERIODIC, "arrays", tuple(map(Array, FIELDS)),
         "3D_CFD_Rand_M1.0_Eta{0}_Zeta{0}_periodic_Train.hdf5", ("eta", "zeta", "M"), constants=(("M", 1.0),),
         equation=EQUATION, positive=POSITIVE, num_frames=21, num_trajectories=100, published=PUBLISHED_3D),
)
