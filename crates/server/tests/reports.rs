//! What users of software like this have reported, and the tests that hold it here.
//!
//! | what went wrong elsewhere | where it was reported | test |
//! |---|---|---|
//! | one splitting rule for both pre-tokenizers | invergent-ai/surogate#105 | `text/src/split.rs` the_rules_differ_in_combining_marks_alone |
//! | other ids than the model was trained with | kekzl/imp#660 | `text/tests/oracle.rs` ids_of_the_corpus_are_the_oracle_s |
//! | an unknown pre-tokenizer falls back to another | kekzl/imp#660 | `text/tests/vocabulary.rs` each_defect_of_the_arrays_is_named |
//! | decomposed text has other ids | ggml-org/llama.cpp#6980 | `text/tests/oracle.rs` composed_and_decomposed_text_have_the_same_ids |
//! | a character over two tokens is broken | antonellof/ferrox#124 | `text/tests/stream.rs` a_character_over_several_tokens_comes_whole |
//! | a stop text over several tokens leaks or is missed | vllm-project/vllm#3574 | `text/tests/stream.rs` stop_strings_are_found_however_the_stream_is_cut |
//! | stop texts in thinking and in JSON | SharpAI/SwiftLM#126 | `server/tests/agents.rs` a_stop_text_ends_thinking_and_json_too |
//! | a user's text becomes control tokens | InternLM/lmdeploy#4960 | `server/src/tests.rs` text_never_becomes_control_tokens |
//! | so does a value in a template | ollama/ollama#17262 | `text/tests/template.rs` forged_conversations_have_the_template_s_tokens_alone |
//! | a late system message is an error 500 | ggml-org/llama.cpp#27367 | `server/src/tests.rs` late_system_messages_keep_their_place |
//! | several developer messages fail | lmstudio-ai/lmstudio-bug-tracker#2298 | `server/src/tests.rs` several_system_messages_at_the_beginning_are_one |
//! | arguments as text in the history, broken ones too | ggml-org/llama.cpp#19905 | `server/src/tests.rs` arguments_in_the_history_may_be_text |
//! | reasoning is not taken back | ggml-org/llama.cpp#25887 | `server/src/tests.rs` reasoning_is_replayed_as_the_template_wants_it |
//! | a second call is lost, whatever the split | vllm-project/vllm#45440 | `text/tests/calls.rs` two_json_calls_in_a_row |
//! | streamed calls all have index 0 and the reason `stop` | ollama/ollama#16212 | `server/src/tests.rs` two_calls_have_their_indexes_streamed_and_whole |
//! | arguments come all at once, or differ when streamed | sgl-project/sglang#6310 | `text/tests/calls.rs` texts_among_the_arguments_come_as_they_are_written |
//! | types guessed from text | lablup/mlxcel#1336 | `text/tests/calls.rs` xml_values_are_typed_by_the_schema_only |
//! | an enumeration is quoted twice | zed-industries/zed#55186 | `text/tests/calls.rs` json_values_take_the_types_of_the_schema |
//! | a value that does not convert drops the call | ml-explore/mlx-lm#1310 | `text/tests/calls.rs` values_that_do_not_convert_keep_the_call |
//! | a call without its wrapper is shown as text | ml-explore/mlx-lm#1616 | `text/tests/calls.rs` a_call_without_its_wrapper_is_a_call_if_the_tool_is_declared |
//! | the end of thinking over several parts leaks | tenstorrent/tt-inference-server#4386 | `text/tests/calls.rs` reasoning_is_kept_apart |
//! | `tool_choice: none` is ignored | tenstorrent/tt-inference-server#4386 | `server/tests/agents.rs` without_a_choice_no_tool_is_told_of_and_no_call_is_parsed |
//! | one odd tool refuses the request | ggml-org/llama.cpp#19051 | `server/tests/structured.rs` what_cannot_be_enforced_is_refused_by_name |
//! | a schema is dropped silently | ggml-org/llama.cpp#26930 | `server/tests/structured.rs` answers_satisfy_their_schema_at_any_temperature |
//! | work for clients that have gone | ggml-org/llama.cpp#24496 | `engine/tests/scheduler.rs` a_request_given_up_ends_with_the_next_turn_in_every_phase |
//! | silence while a long prompt is read | antirez/ds4#222 | `server/src/tests.rs` a_silent_engine_does_not_make_a_silent_stream |
//! | overflow in words that agents do not know | janhq/jan#8655 | `server/src/tests.rs` a_full_context_is_told_in_words_agents_know |
//! | a limit is advertised that does not hold | earendil-works/pi#6751 | `server/tests/agents.rs` the_limit_that_is_told_is_the_one_that_holds |
//! | usage unasked, in every part, without cached tokens | ggml-org/llama.cpp#22081 | `server/tests/agents.rs` usage_comes_once_and_only_when_asked_for |
//! | probabilities refused beside tools, or as ids | ml-explore/mlx-lm#1630 | `server/tests/agents.rs` logprobs_are_the_same_streamed_and_whole_beside_tools_too |
//! | one long prompt starves the others | ggml-org/llama.cpp#29175 | `engine/tests/scheduler.rs` an_answer_goes_on_while_a_long_prompt_is_read |
//! | short prompts are never kept, a turn is forgotten | ggml-org/llama.cpp#21831 | `engine/tests/reuse.rs` short_prompts_are_kept_too |
//! | saved, restored, and read again all the same | ggml-org/llama.cpp#25913 | `engine/tests/store.rs` after_a_restart_only_what_is_new_is_read |
//! | a state of other weights is taken | antirez/ds4#805 | `engine/tests/store.rs` sessions_of_others_are_refused |
//! | the history of a session with tools is read again | antirez/ds4#62 | `server/tests/agents.rs` a_session_with_tools_is_read_once |
//! | sequences at once mix their states | ikawrakow/ik_llama.cpp#1932 | `engine/tests/scheduler.rs` identical_requests_at_once_give_the_answer_of_one_alone |
//! | a code word of somebody else's prompt | jundot/omlx#2119 | `engine/tests/scheduler.rs` different_requests_do_not_mix |
//! | greedy answers change when the prefix is cached | ggml-org/llama.cpp#19981 | `engine/tests/reuse.rs` asking_again_costs_less_than_a_grid_cell |
//! | a title request drives the session out | ggml-org/llama.cpp#22746 | `engine/tests/reuse.rs` a_title_request_in_between_costs_nothing |
//! | memory grows with every turn | ggml-org/llama.cpp#25437 | `engine/tests/reuse.rs` long_use_stays_within_the_budget |
//! | array parts, `max_tokens` -1 and the like fail | lmstudio-ai/lmstudio-bug-tracker#812 | `server/tests/agents.rs` every_recorded_shape_is_answered_whole_and_streamed |

/// The table above is true: every test in it exists.
#[test]
fn every_report_has_its_test() {
    let crates = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let rows = include_str!("reports.rs").lines().filter_map(|line| line.strip_prefix("//! |")).skip(2);
    let mut count = 0;
    for row in rows {
        let (file, test) = row.rsplit('|').nth(1).and_then(|cell| cell.trim().split_once("` ")).expect(row);
        let source = std::fs::read_to_string(crates.join(file.trim_start_matches('`'))).expect(row);
        let at =
            source.find(&format!("fn {test}()")).unwrap_or_else(|| panic!("there is no {test} in {file}"));
        let attribute = source[..at].lines().rev().find(|line| line.trim_start().starts_with("#["));
        assert!(attribute.is_some_and(|line| line.contains("test")), "{test} is no test");
        count += 1;
    }
    assert_eq!(count, 41, "a row was added or lost: count it");
}
