"""Published PDEBench files of our tasks: where they are on DaRUS and what their MD5 is.

From PDEBench's download table (pdebench_data_urls.csv); data set doi:10.18419/darus-2986. A file is at data.url/ID.
First editions of the advection files moved at twice beta, those of Burgers had a wrong flux and domain (PDEBench issues
46 and 51); both were replaced in 2023-24 and still circulate, so the first digits of their MD5 are kept as well.
"""

from __future__ import annotations

# file name: (DaRUS id, MD5)
PUBLISHED: dict[str, tuple[int, str]] = {
    "1D_Advection_Sols_beta0.1.hdf5": (255672, "b4be2fc3383f737c76033073e6d2ccfb"),
    "1D_Advection_Sols_beta0.2.hdf5": (255671, "d47b52c1be4b6bcaa8748a8df2f5fbb8"),
    "1D_Advection_Sols_beta0.4.hdf5": (255674, "d595bbfd2c659df995a93cd40d6ea568"),
    "1D_Advection_Sols_beta0.7.hdf5": (255666, "f89030c240a1e90b55649776854a84c2"),
    "1D_Advection_Sols_beta1.0.hdf5": (255675, "1fe41923a4123db55bf4e89bea32e142"),
    "1D_Advection_Sols_beta2.0.hdf5": (255677, "0e9beff98693089c38e213a1f2b9ac43"),
    "1D_Advection_Sols_beta4.0.hdf5": (255676, "a87b03ff425496360e2732921805f47d"),
    "1D_Advection_Sols_beta7.0.hdf5": (255664, "72a286ad2fcba574bd20bc045ba82d58"),
    "1D_Burgers_Sols_Nu0.001.hdf5": (268190, "44cb784d5a07aa2b1c864cabdcf625f9"),
    "1D_Burgers_Sols_Nu0.002.hdf5": (268193, "edf1cd13622d151dfde3e4e5af7a95b4"),
    "1D_Burgers_Sols_Nu0.004.hdf5": (268191, "435e1fecb8a64a0b4563bb8d09f81c33"),
    "1D_Burgers_Sols_Nu0.01.hdf5": (281363, "e6d9a4f62baf9a29121a816b919e2770"),
    "1D_Burgers_Sols_Nu0.02.hdf5": (268189, "7c8c717a3a7818145877baa57106b090"),
    "1D_Burgers_Sols_Nu0.04.hdf5": (281362, "16f4c7afaf8c16238be157e54c9297c7"),
    "1D_Burgers_Sols_Nu0.1.hdf5": (268185, "660ba1008d3843bf4e28d2895eb607ce"),
    "1D_Burgers_Sols_Nu0.2.hdf5": (268187, "01d9333254dff2f3cad090b61f5cf695"),
    "1D_Burgers_Sols_Nu0.4.hdf5": (268192, "58327a6107e8f9defb5075677cc42533"),
    "1D_Burgers_Sols_Nu1.0.hdf5": (281365, "9021eba35332d127306f11ef84c1a60f"),
    "1D_Burgers_Sols_Nu2.0.hdf5": (281364, "70fe0c24d9313e70f6059e5212bdb3d7"),
    "1D_Burgers_Sols_Nu4.0.hdf5": (268188, "8af7f70166c00ffad377c80fa477d81f"),
    "ReacDiff_Nu0.5_Rho1.0.hdf5": (133177, "69a429239778d529cd419ed5888ea835"),
    "ReacDiff_Nu1.0_Rho1.0.hdf5": (133181, "bd73c2f3448d03e95e98c3831fc8fa70"),
    "ReacDiff_Nu2.0_Rho1.0.hdf5": (133185, "925a7e2c9b9e40ad2dd44b7002ec882b"),
    "ReacDiff_Nu5.0_Rho1.0.hdf5": (133189, "0ed75b55f61bec11c47d379e34959e54"),
    "1D_diff-sorp_NA_NA.h5": (133020, "9d466d1213065619d087319e16d9a938"),
    "1D_CFD_Rand_Eta1.e-8_Zeta1.e-8_periodic_Train.hdf5": (135485, "ad22fe08b8abc721179dbb34f2cc8b2a"),
    "1D_CFD_Rand_Eta0.01_Zeta0.01_periodic_Train.hdf5": (164672, "2fdd00138f1d7abc794fb953021a9f43"),
    "1D_CFD_Rand_Eta0.1_Zeta0.1_periodic_Train.hdf5": (164668, "45655bd77d006ab539c52b7fbcf099b9"),
    "2D_DarcyFlow_beta0.01_Train.hdf5": (133217, "d05c287d4c0b7d3178b0097084238251"),
    "2D_DarcyFlow_beta0.1_Train.hdf5": (133218, "294f9a03a4aa16b0e386469ca8b471be"),
    "2D_DarcyFlow_beta1.0_Train.hdf5": (133219, "81694ed31306ff2e5f6b76349b0b4389"),
    "2D_DarcyFlow_beta10.0_Train.hdf5": (133220, "a7f23cf8011fc211b180828af39b7d1a"),
    "2D_DarcyFlow_beta100.0_Train.hdf5": (133221, "7c09f3b1bb097737d3fd52ffb0c6f1c8"),
    "2D_diff-react_NA_NA.h5": (133017, "b8d0b86064193195ddc30c33be5dc949"),
    "2D_rdb_NA_NA.h5": (133021, "75d838c47aa410694bdc912ea7f22282"),
    "2D_CFD_Rand_M0.1_Eta1e-08_Zeta1e-08_periodic_512_Train.hdf5": (164689, "ae2552864d0856f58dc74132a2f95d20"),
    "2D_CFD_Rand_M0.1_Eta0.01_Zeta0.01_periodic_128_Train.hdf5": (164687, "5b21dcccaef4d2145ca579a71153c580"),
    "2D_CFD_Rand_M0.1_Eta0.1_Zeta0.1_periodic_128_Train.hdf5": (164688, "b2733888745a1d64e36df813e979910b"),
    "ns_incom_inhom_2d_512-0.h5": (133280, "54109d46f9c957317bd670ddb2068ac0"),
    "3D_CFD_Rand_M1.0_Eta1e-08_Zeta1e-08_periodic_Train.hdf5": (164693, "45892a12d1066d54af74badae55c438e"),
}

# tasks of ours in PDEBench's layout, which nobody publishes
UNPUBLISHED: tuple[str, ...] = ("darcy2d_grf",)

# file name: first eight digits of the MD5 of the withdrawn first edition
WITHDRAWN: dict[str, str] = {
    "1D_Advection_Sols_beta0.1.hdf5": "183cd9b7",
    "1D_Advection_Sols_beta0.2.hdf5": "e6b6997e",
    "1D_Advection_Sols_beta0.4.hdf5": "99d57a5a",
    "1D_Advection_Sols_beta1.0.hdf5": "91a599ed",
    "1D_Advection_Sols_beta2.0.hdf5": "24bb9795",
    "1D_Advection_Sols_beta4.0.hdf5": "73ec4f79",
    "1D_Burgers_Sols_Nu0.001.hdf5": "5f7242c8",
    "1D_Burgers_Sols_Nu0.002.hdf5": "eb7cc49d",
    "1D_Burgers_Sols_Nu0.004.hdf5": "e1c40dd4",
    "1D_Burgers_Sols_Nu0.01.hdf5": "0a49257a",
    "1D_Burgers_Sols_Nu0.02.hdf5": "79047cf2",
    "1D_Burgers_Sols_Nu0.04.hdf5": "4aea3340",
    "1D_Burgers_Sols_Nu0.1.hdf5": "f50828c7",
    "1D_Burgers_Sols_Nu0.2.hdf5": "e9791092",
    "1D_Burgers_Sols_Nu0.4.hdf5": "3389b8dd",
    "1D_Burgers_Sols_Nu1.0.hdf5": "69c1890c",
    "1D_Burgers_Sols_Nu2.0.hdf5": "fe6a312a",
    "1D_Burgers_Sols_Nu4.0.hdf5": "f9f84827",
}
