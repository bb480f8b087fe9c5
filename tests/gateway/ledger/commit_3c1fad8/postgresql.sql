SET statement_timeout = 0;
SET lock_timeout = 0;
SET idle_in_transaction_session_timeout = 0;
SET client_encoding = 'UTF8';
SET standard_conforming_strings = on;
SELECT pg_catalog.set_config('search_path', '', false);
SET check_function_bodies = false;
SET xmloption = content;
SET client_min_messages = warning;
SET row_security = off;
SET default_tablespace = '';
SET default_table_access_method = heap;
CREATE TABLE public.gateway_usage (
    request_id character varying NOT NULL,
    "time" timestamp with time zone NOT NULL,
    day date NOT NULL,
    key character varying NOT NULL,
    team character varying,
    model character varying,
    server character varying,
    endpoint character varying NOT NULL,
    stream boolean NOT NULL,
    status integer,
    code character varying,
    incomplete character varying,
    prompt_tokens bigint,
    completion_tokens bigint,
    cached_tokens bigint,
    reasoning_tokens bigint,
    estimated boolean NOT NULL,
    total_ms double precision,
    first_token_ms double precision,
    queued_ms double precision,
    cost_nano bigint,
    labels jsonb NOT NULL,
    end_user character varying,
    metadata jsonb
);
CREATE TABLE public.gateway_usage_schema (
    version_num character varying(32) NOT NULL
);
INSERT INTO public.gateway_usage VALUES ('req_1', '2026-11-15 00:00:00.25+00', '2026-11-15', 'team-a', 'research', 'tiny', 'tiny#0', '/v1/chat/completions', false, 200, NULL, NULL, 10, 5, 2, 1, false, 250, NULL, 100, 6000, '{"cost_center": "17"}', 'u', '{"m": [1]}');
INSERT INTO public.gateway_usage VALUES ('req_2', '2026-11-15 00:00:01.5+00', '2026-11-15', 'team-a', NULL, 'tiny', 'tiny#0', '/v1/chat/completions', true, 499, NULL, 'client', 10, 7, NULL, NULL, true, 1500, 100, NULL, 7600, '{}', NULL, NULL);
INSERT INTO public.gateway_usage VALUES ('req_3', '2026-11-15 00:00:02.5+00', '2026-11-15', 'team-b', NULL, NULL, NULL, '/v1/embeddings', false, 404, 'model_not_found', NULL, NULL, NULL, NULL, NULL, false, NULL, NULL, NULL, NULL, '{}', NULL, NULL);
INSERT INTO public.gateway_usage_schema VALUES ('0001');
ALTER TABLE ONLY public.gateway_usage
    ADD CONSTRAINT gateway_usage_pkey PRIMARY KEY (request_id);
ALTER TABLE ONLY public.gateway_usage_schema
    ADD CONSTRAINT gateway_usage_schema_pkc PRIMARY KEY (version_num);
CREATE INDEX gateway_usage_key_time ON public.gateway_usage USING btree (key, "time");
CREATE INDEX gateway_usage_time ON public.gateway_usage USING btree ("time");
