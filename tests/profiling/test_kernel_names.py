"""What the names of kernels say: names as profilers print them on GPUs from Volta to Hopper."""

from __future__ import annotations

import pytest

from tilefit.profiling.kernel_names import older_path, read_name

HOPPER = (9, 0)
YES, NO, UNKNOWN = True, False, None

NAMES = [
    # cuBLAS and CUTLASS
    ("nvjet_tst_128x128_64x4_1x2_h_bz_coopA_TNT", YES, "sm90"),
    ("nvjet_sm90_hsh_192x192_64x3_1x2_h_bz_coopB_NNT", YES, "sm90"),
    ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x64_64x6_tn_align1>(P)", YES, "sm80"),
    ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x64_8x5_tn_align1>(P)", NO, ""),
    (
        "sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_stage4_warpsize2x2x1_tensor16x8x16_kernel",
        YES,
        "sm80",
    ),
    (
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int>, "
        "cutlass::gemm::collective::CollectiveMma<cutlass::gemm::MainloopSm90TmaGmmaWarpSpecialized<4>>>>(P)",
        YES,
        "sm90",
    ),
    ("ampere_sgemm_128x64_tn", NO, ""),
    ("volta_hgemm_128x64_tn", NO, ""),
    ("volta_h884gemm_256x64_ldg8_tn", YES, "sm70"),
    ("turing_fp16_s1688gemm_fp16_128x128_ldg8_f2f_tn", YES, "sm75"),
    ("ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_32x5_tn", YES, "sm80"),
    ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(P)", NO, ""),
    ("std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, __nv_bfloat16>(P)", NO, ""),
    # cuDNN
    (
        "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64_cudnn",
        YES,
        "sm90",
    ),
    (
        "sm80_xmma_wgrad_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x128x32",
        YES,
        "sm80",
    ),
    (
        "cutlass__5x_cudnn::Kernel<cutlass_tensorop_s1688fprop_optimized_tf32_128x128_16x4_nhwc_align4>",
        YES,
        "sm80",
    ),
    ("cutlass__5x_cudnn::Kernel<cutlass_tensorop_f16_s1688fprop_optimized_f16_64x64_32x2>", YES, "sm75"),
    ("cutlass_tensorop_i8816fprop_optimized_s8_64x64_64x2_nhwc_align16", YES, "sm75"),
    ("cutlass_tensorop_d884gemm_64x64_16x4_nn_align1", YES, "sm80"),
    ("ampere_scudnn_128x64_relu_medium_nn_v1", NO, ""),
    ("volta_fp16_s884cudnn_fp16_256x128_ldg8_relu_f2f_exp_small_nhwc_tn_v1", YES, "sm70"),
    ("void implicit_convolve_sgemm<float, float, 1024, 5, 5, 3, 3, 3, 1, false>(P)", NO, ""),
    ("void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>(P)", NO, ""),
    ("void cudnn::engines_precompiled::nchwToNhwcKernel<__nv_bfloat16>(P)", NO, ""),
    ("void at::native::(anonymous namespace)::conv_depthwise2d_forward_kernel<3, float>(P)", NO, ""),
    # attention
    ("void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64>>(P)", YES, "sm80"),
    ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<T>(P)", YES, "sm80"),
    ("void pytorch_flash::flash_bwd_dot_do_o_kernel<true, T>(P)", NO, ""),
    ("void pytorch_flash::flash_bwd_convert_dq_kernel<T>(P)", NO, ""),
    ("void pytorch_flash::flash_fwd_splitkv_combine_kernel<T>(P)", NO, ""),
    (
        "void cutlass::device_kernel<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90<2>>>(P)",
        YES,
        "sm90",
    ),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128", YES, "sm90"),
    ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80(P)", YES, "sm80"),
    ("fmha_cutlassB_f32_aligned_64x64_k32_sm80(P)", YES, "sm80"),
    ("fmha_cutlassF_f32_notaligned_64x64_rf_sm50(P)", NO, ""),
    # Inductor's and PyTorch's own
    ("triton_poi_fused_add_gelu_3", NO, ""),
    ("triton_red_fused_native_layer_norm_1", NO, ""),
    ("triton_per_fused__softmax_1", NO, ""),
    ("triton_tem_fused_addmm_2", YES, ""),
    ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)", NO, ""),
    ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<T>(P)", NO, ""),
    # what does not tell
    ("RNN_blockPersist_fp_LSTM", UNKNOWN, ""),
    ("my_fused_mlp_kernel", UNKNOWN, ""),
]


@pytest.mark.parametrize(
    ("name", "tensor_core", "generation"), NAMES, ids=[name[:40] for name, _, _ in NAMES]
)
def test_tensor_cores_and_generation(name: str, tensor_core: bool | None, generation: str) -> None:
    read = read_name(name)
    assert read.tensor_core is tensor_core
    assert read.generation == generation


def test_old_code_is_told_on_hopper_alone() -> None:
    misaligned = read_name(
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x64_64x6_tn_align1>(P)"
    )
    assert older_path(misaligned, HOPPER)
    assert not older_path(misaligned, (8, 0))
    assert not older_path(read_name("nvjet_tst_128x128_64x4_1x2_h_bz_coopA_TNT"), HOPPER)
    assert not older_path(read_name("triton_tem_fused_mm_0"), HOPPER)


@pytest.mark.parametrize(
    "name", ["ncclDevKernel_AllReduce_Sum_bf16_RING_LL(P)", "ncclKernel_AllGather_RING_LL_Sum_int8_t(P)"]
)
def test_communication(name: str) -> None:
    assert read_name(name).communication
    assert read_name(name).tensor_core is False
