"""The models of the zoo by the names that FuxiCTR's configurations give them, and those that stay out, with the reason."""

from collections.abc import Mapping

from dpiframe_core.importers.fuxictr.zoo import conditioned, crossing, evolution, factorized, fields, sequences, tasks, windows
from dpiframe_core.importers.networks.net import Logit

ZOO: Mapping[str, Logit] = {
    "AFM": factorized.afm, "AFN": crossing.afn, "AOANet": fields.aoanet, "APG_DCNv2": conditioned.apg_dcn_v2,
    "APG_DeepFM": conditioned.apg_deep_fm, "AutoInt": fields.autoint, "BST": sequences.bst, "CCPM": windows.ccpm,
    "DCNv3": crossing.dcn_v3, "DESTINE": fields.destine, "DIEN": evolution.dien, "DMIN": sequences.dmin, "DMR": sequences.dmr,
    "DNN": crossing.dnn, "DSSM": fields.dssm, "DeepCrossing": crossing.deep_crossing, "DeepIM": factorized.deep_im,
    "DualMLP": crossing.dual_mlp, "ECN": crossing.ecn, "EDCN": crossing.edcn, "EulerNet": crossing.euler_net,
    "FFM": factorized.ffm, "FFMv2": factorized.ffm_v2, "FGCNN": windows.fgcnn, "FLEN": factorized.flen, "FM": factorized.fm,
    "FiBiNET": factorized.fibinet, "FiGNN": fields.fignn, "FinalMLP": fields.finalmlp, "FinalNet": crossing.final_net,
    "FmFM": factorized.fmfm, "FwFM": factorized.fwfm, "GDCN": crossing.gdcn, "GDCNP": crossing.gdcn_p, "HFM": factorized.hfm,
    "HOFM": factorized.hofm, "InterHAt": fields.interhat, "LR": factorized.lr, "LorentzFM": factorized.lorentz_fm,
    "MaskNet": crossing.masknet, "NFM": factorized.nfm, "ONN": factorized.onn, "ONNv2": factorized.onn_v2,
    "PNN": factorized.pnn, "PPNet": conditioned.ppnet, "QNN_alpha": conditioned.qnn_alpha, "SAM": fields.sam,
    "WuKong": crossing.wukong,
}  # fmt: skip
OF_TASKS: Mapping[str, Logit] = {
    "MMoE": tasks.mmoe,
    "PLE": tasks.ple,
    "SharedBottom": tasks.shared_bottom,
    "ShareBottom": tasks.shared_bottom,
}

_ITEM_TABLES = "its histories come from tables of users and items beside the run, by a loader of its own"
# Of the zoo, but not imported by name.
STAYS_OUT: Mapping[str, str] = dict.fromkeys(("ETA", "MIRRN", "SDIM", "SIM", "TWIN"), _ITEM_TABLES)
